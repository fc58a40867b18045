"""The host arena, page-locked: copies to the GPU are asynchronous and may begin and end anywhere."""

import pytest
import torch

from inference_service.adapters.host_arena import create_host_arena
from inference_service.engine.process import map_host_arena, page_lock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NBYTES = (512 << 20) + 4096


def test_any_part_can_be_copied() -> None:
    host = map_host_arena(create_host_arena(NBYTES))
    host.view(torch.int64).copy_(torch.arange(NBYTES // 8))
    page_lock(host)
    assert host.is_pinned()
    for start in range(16, NBYTES - (64 << 20), 61 << 20):
        part = host[start : start + (64 << 20)]
        assert torch.equal(part.to("cuda", non_blocking=True).cpu(), part)
