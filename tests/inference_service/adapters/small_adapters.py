"""Real adapter files for a tiny base model, and what the registry would say of them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inference_service.adapters.resolution import BaseModelIdentity, ResolvedVersion
from loraplex.registry.v1 import resources_pb2
from shared.base_model import MODULES, fingerprint, linear_shape, module_path, parse_config
from shared.digest import FileEntry, manifest_digest
from shared.sources.resolver import PinnedSource

RAW_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 42, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip
MODEL = parse_config(RAW_CONFIG)
BASE_MODEL = BaseModelIdentity("tiny", fingerprint(RAW_CONFIG))
_DTYPES = {"F32": np.float32, "F16": np.float16}


def encoded(values: np.ndarray, dtype: str) -> bytes:
    """float32 values as F32, F16 or (by truncation) BF16."""
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(_DTYPES[dtype]).tobytes()


def decoded(data: bytes, dtype: str) -> np.ndarray:
    """What `encoded` wrote, as float32."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, _DTYPES[dtype]).astype(np.float32)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def write_adapter(
    folder: Path, *, seed: int = 0, rank: int = 4, modules: Sequence[int] = (0, 2), dtype: str = "F32", scale: float = 1
) -> dict[str, np.ndarray]:
    """An adapter of rank `rank` on `modules` of layers 0 and 2. Returns its tensors as float32, by name."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for layer in (2, 0):
        for module in modules:
            out, columns = linear_shape(MODEL, module)
            for part, shape in (("lora_B", (out, rank)), ("lora_A", (rank, columns))):
                name = f"base_model.model.{module_path(layer, module)}.{part}.weight"
                values = random.standard_normal(shape).astype(np.float32) * scale
                tensors[name] = (dtype, shape, encoded(values, dtype))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [MODULES[m] for m in modules],
        "layers_to_transform": [0, 2], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {name: decoded(data, dtype).reshape(shape) for name, (_, shape, data) in tensors.items()}


def manifest(folder: Path) -> tuple[FileEntry, ...]:
    contents = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
    return tuple(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents)


def version_of(folder: Path, name: str = "a", number: int = 1, uris: Sequence[str] | None = None) -> ResolvedVersion:
    files = manifest(folder)
    sources = tuple(PinnedSource(uri) for uri in (uris if uris is not None else [f"file://root/{folder.name}"]))
    resource = f"namespaces/default/adapters/{name}/versions/{number}"
    return ResolvedVersion(resource, number, f"uid-{name}", manifest_digest(files), files, sources, rank=4)


def message_of(version: ResolvedVersion) -> resources_pb2.AdapterVersion:
    """The version as the registry sends it."""
    files = [{"path": path, "size_bytes": size, "sha256": sha256} for path, size, sha256 in version.files]
    return resources_pb2.AdapterVersion(
        name=version.name,
        digest=version.digest,
        manifest={"files": files},
        pinned_sources=[
            {**source._asdict(), "objects": [item._asdict() for item in source.objects]} for source in version.sources
        ],
        lora_config={"rank": version.rank},
        base_model=f"baseModels/{BASE_MODEL.id}",
        base_model_fingerprint=BASE_MODEL.fingerprint,
    )


def flip_a_bit(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
