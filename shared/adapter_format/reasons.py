"""The errors of this package, each naming the tensor, key or file that is wrong, and saying what to do about it."""

from shared.errors import AdapterInvalid, UnsupportedAdapter

_LONGEST = 300

# What to do, where several errors have it in common.
SAVE_AGAIN = "load the adapter with PEFT on its base model and save it again"
OTHER_BASE = "register it for the base model that it was trained on"
COPY_AGAIN = "copy or download the file again, or save it anew"
TRAIN_WITHOUT = "train with one of the two"
ONE_TRAINING = "take both from the same checkpoint, saved with PEFT"
RIGHT_RANK = "correct r and rank_pattern: saving sorts patterns, and the first that matches counts"


def tensor_invalid(tensor: str, problem: str, advice: str) -> AdapterInvalid:
    """`tensor` contradicts the config or the base model."""
    name = tensor[:_LONGEST]
    return AdapterInvalid(f"tensor {name}: {problem}; {advice}", metadata={"tensor": name})


def tensor_unsupported(tensor: str, key: str, advice: str) -> UnsupportedAdapter:
    """`tensor` belongs to a kind of adapter (config key `key`) that is not served."""
    name = tensor[:_LONGEST]
    return UnsupportedAdapter(f"tensor {name}: {advice}", metadata={"tensor": name, "key": key})


def key_invalid(key: str, problem: str, advice: str) -> AdapterInvalid:
    """`key` of adapter_config.json contradicts other keys, the tensors or the base model."""
    name = key[:_LONGEST]
    return AdapterInvalid(f"adapter_config.json: {name} {problem}; {advice}", metadata={"key": name})


def value_invalid(key: str, rule: str) -> AdapterInvalid:
    """`key` of adapter_config.json has a value that it cannot have. `rule`: what it must be, and is."""
    return key_invalid(key, f"must be {rule}", "set it as in training")


def key_unsupported(key: str, advice: str) -> UnsupportedAdapter:
    """`key` of adapter_config.json asks for something that is not served."""
    name = key[:_LONGEST]
    return UnsupportedAdapter(f"adapter_config.json: {name}: {advice}", metadata={"key": name})


def file_invalid(file: str, problem: str, advice: str) -> AdapterInvalid:
    """`file` is missing or malformed."""
    return AdapterInvalid(f"{file}: {problem}; {advice}", metadata={"file": file})
