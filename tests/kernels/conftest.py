"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before their first import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _language_replaced_once() -> None:
    """The interpreter replaces `triton.language` before every call of a device function, for half of all its time.

    The launch around the call has done it already, but for names that only `triton.language.core` has.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = interpreter.tl

    def call(self: object, *args: object, **kwargs: object) -> object:
        seen = [value for value in self.fn.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(module.load) for module in seen):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
