"""Downloads what is needed of a base model's repository on the Hugging Face Hub into the library's cache."""

import errno
import os
import re
from pathlib import Path

import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from shared.errors import FailedPrecondition, InvalidArgument, LoraplexError, SourceUnavailable
from shared.sources.hub import hub_error, is_unknown_repository

# What is read of a repository. `consolidated*` is a second copy of the weights in another naming.
ALLOWED_WITHOUT_WEIGHTS = ("*.json", "*.jinja")
ALLOWED = (*ALLOWED_WITHOUT_WEIGHTS, "*.safetensors")
IGNORED = ("consolidated*", "original/*", "*/*")

_NO_FOLDER = "no such folder here"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as the Hub's storage client, which is Rust, tells of its own
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def download_model(repository: str, *, with_weights: bool) -> Path:
    """The folder of a snapshot of `repository`, downloaded where the cache does not hold it.

    Raises:
        InvalidArgument: the Hub has no such repository that one may read, or nothing in it (field `model`).
        SourceForbidden: it is gated, or the Hub refuses (metadata `model`, as of the others).
        FailedPrecondition: the files cannot be kept on this machine.
        SourceUnavailable: the Hub cannot be reached or has no answer now, and no copy is here.
    """
    allowed = ALLOWED if with_weights else ALLOWED_WITHOUT_WEIGHTS
    try:
        return Path(snapshot_download(repository, allow_patterns=list(allowed), ignore_patterns=list(IGNORED)))
    except HFValidationError as error:
        raise InvalidArgument.of("model", f"{repository}: {_NO_FOLDER}, and this is no name on the Hub") from error
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        # Where a cached copy is looked for after a failure and there is none, the failure is the cause.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        raise _failed(repository, cause if isinstance(cause, Exception) else error) from error


def _failed(repository: str, error: Exception) -> LoraplexError:
    what, metadata = f"model {repository}", {"model": repository}
    if is_unknown_repository(error):
        advice = "no such repository on the Hub that you may read; correct the name, or set HF_TOKEN"
        return InvalidArgument.of("model", f"{repository}: {_NO_FOLDER}, and {advice}")
    if isinstance(error, RevisionNotFoundError):
        return InvalidArgument.of("model", f"{repository}: the repository has no branch main; nothing is uploaded yet")
    if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        problem = "no copy is here, and HF_HUB_OFFLINE forbids to download one"
        return SourceUnavailable(f"{what}: {problem}; unset it, or fill the cache {_cache()}", metadata=metadata)
    if (reason := _of_this_machine(error)) is not None:
        problem = f"its files cannot be kept in {_cache()}: {reason}"
        advice = "make room, or let HF_HOME name a folder that can be written"
        return FailedPrecondition(f"{what}: {problem}; {advice}", metadata=metadata)
    return hub_error(error, what, metadata)


def _of_this_machine(error: Exception) -> str | None:
    """What is wrong with the disk, or None if it is not the disk."""
    if isinstance(error, OSError) and error.filename is not None:  # errors of connections name no file
        return error.strerror
    found = _OS_ERROR.search(str(error))
    number = int(found[1]) if found is not None else getattr(error, "errno", None)
    return os.strerror(number) if number in _OF_DISKS else None


def _cache() -> str:
    return str(constants.HF_HUB_CACHE)
