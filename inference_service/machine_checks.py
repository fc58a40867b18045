"""Whether this machine has what the settings ask for, found out before any process starts."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from inference_service.config import InferenceConfig, parse_size
from shared.errors import InvalidArgument

# What the kernel reports says little: a virtual machine's memory may grow as it is used. This only finds wrong units.
MOST_HOST_BYTES = 16 << 40


def check_machine(config: InferenceConfig, device: Literal["cpu", "cuda"]) -> None:
    """Folders that are needed, a device that is wanted, memory that is to be taken.

    Raises:
        InvalidArgument: names the setting.
    """
    if device == "cuda" and not cuda_memory():
        raise InvalidArgument.of("device", "this machine has no GPU that PyTorch can use")
    _check_folders(config)
    on_device = cuda_memory() if device == "cuda" else MOST_HOST_BYTES
    for name, there_is in (
        ("host_memory", MOST_HOST_BYTES),
        ("adapter_memory", on_device),
        ("kv_cache_memory", on_device),
    ):
        wanted = getattr(config, name)
        if wanted is not None and parse_size(wanted) > there_is:
            raise InvalidArgument.of(name, f"{wanted} cannot be had: there are {there_is >> 20} MiB in all")


def _check_folders(config: InferenceConfig) -> None:
    roots = config.file_roots.items()
    missing = [f"{name}={folder}" for name, folder in roots if not Path(folder).expanduser().is_dir()]
    if missing:
        raise InvalidArgument.of("file_roots", f"no such folder: {', '.join(missing)}")
    try:
        cache_dir = config.cache_dir.expanduser()
        for folder in (cache_dir, cache_dir / "sha256", cache_dir / "work"):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission to write to it", str(folder))
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InvalidArgument.of("cache_dir", f"{config.cache_dir} cannot be used ({reason})") from None
    except RuntimeError as error:  # "~" of nobody
        raise InvalidArgument.of("cache_dir", f"{config.cache_dir}: {error}") from None


def has_gpu() -> bool:
    """Whether it is worth asking PyTorch, which takes seconds to answer."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


@cache
def cuda_memory() -> int:
    """Bytes of the GPU's memory; 0 if PyTorch can use none. Another process asks it: the supervisor loads no torch."""
    question = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    answer = subprocess.run([sys.executable, "-c", question], check=False, capture_output=True, text=True)
    return int(answer.stdout) if answer.returncode == 0 else 0
