"""Where a base model lies: a folder on this machine, or a snapshot of a Hugging Face repository."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.errors import InvalidArgument


def resolve_model(name_or_path: str, *, with_weights: bool = True) -> Path:
    """The folder of a base model: `name_or_path` itself if it is one, else a download (or cached copy) from the Hub.

    Without weights only the configuration and the tokenizer are downloaded.

    Raises:
        InvalidArgument: neither a folder with a config.json nor a Hub repository one can read (field `model`).
        LoraplexError: it cannot be downloaded (`model_download`).
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidArgument.of("model", f"folder {name_or_path} holds no config.json")
        return folder.resolve()
    if name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") != 1:
        raise InvalidArgument.of("model", f"{name_or_path!r:.200} is neither a folder nor a Hub id (ORG/NAME)")
    # Imported here because it takes half a second that a folder never needs.
    from shared.model_download import download_model

    return download_model(name_or_path, with_weights=with_weights)


def load_raw_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, its `eos_token_id` completed with the ids of generation_config.json.

    Raises:
        InvalidArgument: a file is missing, unreadable or not a JSON object; names the file.
    """
    raw = read_json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        more = read_json_object(generation).get("eos_token_id")
        ids = [*_as_list(raw.get("eos_token_id")), *_as_list(more)]
        raw["eos_token_id"] = list(dict.fromkeys(ids))
    return raw


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises InvalidArgument naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidArgument.of(path.name, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.of(path.name, "is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidArgument.of(path.name, "must be a JSON object")
    return value


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the files `names` that a model folder has. Raises InvalidArgument naming one that cannot be read."""
    found = {}
    for name in names:
        try:
            found[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InvalidArgument.of(name, f"cannot be read: {error.strerror}") from error
    return found
