"""The errors of this package, each naming the tensor, key or file that is wrong."""

from shared.errors import AdapterInvalid, UnsupportedAdapter

_LONGEST = 300


def tensor_invalid(tensor: str, problem: str) -> AdapterInvalid:
    """`tensor` contradicts the config or the base model."""
    name = tensor[:_LONGEST]
    return AdapterInvalid(f"tensor {name}: {problem}", metadata={"tensor": name})


def tensor_unsupported(tensor: str, key: str, advice: str) -> UnsupportedAdapter:
    """`tensor` belongs to a kind of adapter (config key `key`) that is not served."""
    name = tensor[:_LONGEST]
    return UnsupportedAdapter(f"tensor {name}: {advice}", metadata={"tensor": name, "key": key})


def key_invalid(key: str, problem: str) -> AdapterInvalid:
    """`key` of adapter_config.json is wrong."""
    name = key[:_LONGEST]
    return AdapterInvalid(f"adapter_config.json: {name} {problem}", metadata={"key": name})


def key_unsupported(key: str, advice: str) -> UnsupportedAdapter:
    """`key` of adapter_config.json asks for something that is not served."""
    name = key[:_LONGEST]
    return UnsupportedAdapter(f"adapter_config.json: {name}: {advice}", metadata={"key": name})


def file_invalid(file: str, problem: str) -> AdapterInvalid:
    """`file` is missing or malformed."""
    return AdapterInvalid(f"{file}: {problem}", metadata={"file": file})
