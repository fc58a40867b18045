"""Compiling kernels before any is launched, many at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and load them onto the current device."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, "compile", torch.cuda.set_device, (torch.cuda.current_device(),))

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """`AsyncCompileMode` hands in nothing else."""

        def compile_and_load() -> Any:
            kernel = compile_kernel()
            _ = kernel.run  # loads the kernel, and compiles what launches it
            return kernel

        return super().submit(compile_and_load)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Ops that are called within only compile what they would launch, beside each other; all is compiled and loaded at
    the end.

    What they return is uninitialised, so nothing may look up memory by it. Triton's compiler spends nine tenths of its
    time outside of Python, where threads do run beside each other. An error is raised when the kernel is launched.
    """
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=True, **options)

    with _Compilers(threads) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch
