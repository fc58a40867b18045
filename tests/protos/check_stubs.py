"""Fails unless the checked-in stubs are what the generator makes of protos/ today."""

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path) -> None:
    protos = sorted(str(p.relative_to(ROOT / "protos")) for p in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, f"--mypy_grpc_out=only_async:{out}"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run([*command, *protos], cwd=ROOT, check=True, env={"PATH": path}, capture_output=True)


def stale(out: Path) -> list[str]:
    fresh = {str(p.relative_to(out)) for p in out.rglob("*_pb2*")}
    kept = {str(p.relative_to(ROOT)) for p in (ROOT / "loraplex").rglob("*_pb2*") if p.suffix in (".py", ".pyi")}
    return sorted((fresh ^ kept) | {f for f in fresh & kept if not filecmp.cmp(out / f, ROOT / f, shallow=False)})


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        files = stale(Path(folder))
    for file in files:
        print(f"stale: {file}; run `make stubs`")
    return bool(files)


if __name__ == "__main__":
    sys.exit(main())
