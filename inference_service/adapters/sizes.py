"""Whether an adapter is larger than what this replica has for any, found out before its files are fetched."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from inference_service.adapters.config import Dtype
from shared.base_model import MODULES
from shared.errors import AdapterMemory

_PARAMETER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TOLD_PARAMETER_BYTES = 2  # in the registry's answer
_FACTORS = frozenset({"lora", "block_diagonal"})


class PackedSize(NamedTuple):
    """What the registry tells of a blob's size: `factors`, bytes of linears that have LoRA factors only, and `others`,
    those that have gains or offsets besides, both at two bytes a parameter. Rows of embedding and head are not in it:
    how many are kept is found out when the files are read."""

    factors: int = 0
    others: int = 0

    def at_least(self, dtype: Dtype) -> int:
        """Bytes that the blob has at the least."""
        return self.factors * _PARAMETER_BYTES[dtype] // _TOLD_PARAMETER_BYTES + self.others


def packed_size(lora_config: Any) -> PackedSize:
    """Of a `LoraConfig`; nothing if it is of a registry that does not tell."""
    factors = others = 0
    for module in lora_config.modules:
        if module.module in MODULES and module.rank:
            has_factors_only = _FACTORS.issuperset(module.kinds)
            factors += max(module.device_bytes, 0) * has_factors_only
            others += max(module.device_bytes, 0) * (not has_factors_only)
    return PackedSize(factors, others)


def together(sizes: Sequence[PackedSize]) -> PackedSize:
    """Of one adapter, or of a blend of several, whose factors lie behind each other and whose offsets are summed."""
    return PackedSize(sum(size.factors for size in sizes), max((size.others for size in sizes), default=0))


class Capacity(NamedTuple):
    """Bytes of the tiers. `device`: 0 if the engine chooses."""

    disk: int
    host: int
    device: int = 0

    def check(self, versions: Sequence[str], files: int, blob: int) -> None:
        """Whether there is a place for files of so many bytes, and for a blob of at least so many.

        Args:
            versions: Name of the version, or names of those that are blended.
            files: Bytes in all.
            blob: Bytes.

        Raises:
            AdapterMemory: no; names every setting that is too small, and its tier in the metadata.
        """
        tiers = (
            ("disk", "disk", "--disk-bytes", files, self.disk),
            ("host", "host memory", "--host-memory", blob, self.host),
            ("device", "device memory", "--adapter-memory", blob, self.device),
        )
        small = [tier for tier in tiers if 0 < tier[-1] < tier[-2]]
        if not small:
            return
        lacks = [f"{wanted} bytes of {where} (raise {flag}, now {has})" for _, where, flag, wanted, has in small]
        what = versions[0] if len(versions) == 1 else f"the blend of {' and '.join(versions)}"
        raise AdapterMemory(
            f"{what} is larger than this replica has room for: it takes {' and '.join(lacks)}",
            metadata={"version": ",".join(versions), "tier": ",".join(tier for tier, *_ in small)},
        )
