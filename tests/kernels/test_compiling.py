"""Kernels are compiled ahead without being launched, and launched afterwards without being compiled again."""

import pytest
import torch

triton = pytest.importorskip("triton")
from kernels import sampling_triton, silu_mul_triton  # noqa: E402  the interpreter is chosen by conftest
from kernels.compiling import compiling  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_nothing_is_launched_and_all_is_compiled() -> None:
    ids, sources = torch.arange(7, device="cuda"), torch.full((7,), -1, device="cuda")
    out = torch.zeros(7, dtype=torch.int64, device="cuda")
    x = torch.randn(3, 96, device="cuda", dtype=torch.float16)
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: names.append(fn.name)
    try:
        with compiling(4):
            sampling_triton.take_sampled(ids, sources, ids, out)
            silu_mul_triton.silu_mul(x)
        torch.cuda.synchronize()
        assert not out.any()
        names.clear()
        sampling_triton.take_sampled(ids, sources, ids, out)
        assert torch.equal(out, ids)
        assert silu_mul_triton.silu_mul(x).isfinite().all()
        assert names == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def test_an_error_is_raised_by_the_launch() -> None:
    @triton.jit
    def broken(x):
        triton.language.store(x, nothing)  # type: ignore[name-defined]  # noqa: F821

    x = torch.zeros(1, device="cuda")
    with compiling(2):
        broken[(1,)](x)
    with pytest.raises(Exception, match="nothing"):
        broken[(1,)](x)
    with compiling(2):  # nothing is left over
        silu_mul_triton.silu_mul(torch.zeros((1, 8), device="cuda"))
