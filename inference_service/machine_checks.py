"""Whether this machine has what the settings ask for, found out before any process starts."""

import importlib.util
import mmap
import os
import re
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
    if device == "cuda":
        _check_kernel_cache(config)
    on_device = cuda_memory() if device == "cuda" else MOST_HOST_BYTES
    for name, there_is, num_tensors in (
        ("host_memory", MOST_HOST_BYTES, 0),
        ("adapter_memory", on_device, 1),
        ("kv_cache_memory", on_device, 2),
    ):
        wanted = getattr(config, name)
        if wanted is None:
            continue
        if parse_size(wanted) > there_is:
            raise InvalidArgument.of(name, f"{wanted} cannot be had: there are {there_is >> 20} MiB in all")
        if device == "cpu" and num_tensors and _is_refused(parse_size(wanted) // num_tensors):
            raise InvalidArgument.of(
                name, f"{wanted} cannot be had: the system has {_machine_bytes() >> 20} MiB in all"
            )


def _is_refused(nbytes: int) -> bool:
    """Whether the system would not set so much aside, as it is asked to for a tensor. Nothing is taken."""
    try:
        mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError):
        return True
    return False


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_folders(config: InferenceConfig) -> None:
    roots = config.file_roots.items()
    missing = [f"{name}={folder}" for name, folder in roots if not Path(folder).expanduser().is_dir()]
    if missing:
        raise InvalidArgument.of("file_roots", f"no such folder: {', '.join(missing)}")
    try:
        cache_dir = config.cache_dir.expanduser()
        for folder in (cache_dir, cache_dir / "sha256", cache_dir / "work"):
            _make_folder(folder)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InvalidArgument.of("cache_dir", f"{config.cache_dir} cannot be used ({reason})") from None
    except RuntimeError as error:  # "~" of nobody
        raise InvalidArgument.of("cache_dir", f"{config.cache_dir}: {error}") from None


def _check_kernel_cache(config: InferenceConfig) -> None:
    """It is private: code that is found there is run."""
    folder = kernel_cache(config)
    try:
        _make_folder(folder, 0o700)
    except OSError as error:
        raise InvalidArgument.of("kernel_cache_dir", f"{folder} cannot be used: {error.strerror}") from None


def kernel_cache(config: InferenceConfig) -> Path:
    """Where compiled kernels are kept."""
    return (config.kernel_cache_dir or config.cache_dir / "kernels").expanduser().absolute()


def _make_folder(folder: Path, mode: int = 0o777) -> None:
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(0, "no permission to write to it", str(folder))


def has_gpu() -> bool:
    """Whether it is worth asking the driver."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


@cache
def cuda_memory() -> int:
    """Bytes of the first GPU's memory; 0 if PyTorch can use none.

    Neither the driver nor PyTorch is loaded here: another process asks the driver, and PyTorch's file says whether it
    was built for it. To ask PyTorch itself takes seconds.
    """
    if not _torch_has_cuda():
        return 0
    answer = subprocess.run([sys.executable, "-c", _ASK_DRIVER], check=False, capture_output=True, text=True)
    return int(answer.stdout) if answer.returncode == 0 else 0


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b.*=\s*['\"]\d", version.read_text(), re.MULTILINE) is not None


_ASK_DRIVER = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
device, nbytes = ctypes.c_int(), ctypes.c_size_t()
assert driver.cuInit(0) == 0
assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device) == 0
print(nbytes.value)
"""
