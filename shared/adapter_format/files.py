"""Which files of a folder make an adapter."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shared.adapter_format.reasons import SAVE_AGAIN, file_invalid
from shared.errors import UnsupportedAdapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class AdapterFiles(NamedTuple):
    """Paths, relative to the adapter's folder."""

    config: str
    weights: str


def named_folder(names: Iterable[str], folders: Sequence[str]) -> str | None:
    """The folder below that holds the adapter: PEFT saves one that is not called "default" one down, by its name.

    None if the folder with these files and folders is the adapter's own.

    Raises:
        AdapterInvalid: it holds no adapter and several folders (metadata `file`).
    """
    below = [folder for folder in folders if _ADAPTER_NAME.fullmatch(folder)]
    if {CONFIG, WEIGHTS, PICKLE} & set(names) or not below:
        return None
    if len(below) > 1:
        shown = ", ".join(below[:5])[:200] + (f" and {len(below) - 5} more" if len(below) > 5 else "")
        raise file_invalid(CONFIG, "is missing from the adapter's folder, which holds others", f"name one of {shown}")
    return below[0]


def adapter_files(names: Iterable[str], folders: Callable[[], Iterable[str]] = tuple) -> AdapterFiles:
    """Pick the config and the weights out of a folder's listing (`/`-separated paths relative to the folder).

    `folders`: gives the folders in it, if the listing does not tell; asked only where a file is missing.

    Raises:
        AdapterInvalid: a file is missing (metadata `file`).
        UnsupportedAdapter: the weights are a pickle or in several files.
    """
    listing = set(names)
    if CONFIG not in listing:
        check_no_folder(CONFIG, listing, folders)
        below = sorted(name for name in listing if name.endswith(f"/{CONFIG}"))
        advice = f"{below[0][:200]} exists: name that folder" if below else SAVE_AGAIN
        raise file_invalid(CONFIG, "is missing from the adapter's folder", advice)
    if WEIGHTS in listing:
        return AdapterFiles(CONFIG, WEIGHTS)
    check_no_folder(WEIGHTS, listing, folders)
    if sharded := sorted(name for name in listing if name.startswith("adapter_model") and ".safetensors" in name):
        raise UnsupportedAdapter(
            f"{sharded[0][:200]}: weights in several files are not served; save one {WEIGHTS}",
            metadata={"file": sharded[0][:200]},
        )
    if PICKLE in listing:
        raise UnsupportedAdapter(
            f"{PICKLE}: pickle files can run code when read; load the adapter with PEFT and save it again with "
            "safe_serialization=True",
            metadata={"file": PICKLE},
        )
    raise file_invalid(WEIGHTS, "is missing from the adapter's folder", SAVE_AGAIN)


def check_no_folder(file: str, listing: Iterable[str], folders: Callable[[], Iterable[str]]) -> None:
    """Refuse a folder in the place of `file`, as `hf download --local-dir FILE` makes it, and a container's mount of a
    file that is not there. Raises AdapterInvalid (metadata `file`)."""
    if any(name.startswith(f"{file}/") for name in listing) or file in folders():
        raise file_invalid(file, "is a folder, not a file", "put the file itself in its place")
