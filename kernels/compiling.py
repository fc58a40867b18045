"""Compiling kernels before any is launched, many at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Ops that are called within only compile what they would launch, beside each other; all is compiled at the end.

    What they return is uninitialised, so nothing may look up memory by it. Triton's compiler spends nine tenths of its
    time outside of Python, where threads do run beside each other. An error is raised when the kernel is launched.
    """
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=True, **options)

    with (
        ThreadPoolExecutor(threads, "compile") as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
        patch.object(JITFunction, "run", compile_only),
    ):
        yield
