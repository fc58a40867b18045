"""lora_A and lora_B of one module: shapes, rank and scale."""

import math

from shared.adapter_format.draft import Draft, check_dtype
from shared.adapter_format.names import Site
from shared.adapter_format.reasons import (
    ONE_TRAINING,
    OTHER_BASE,
    RIGHT_RANK,
    SAVE_AGAIN,
    tensor_invalid,
    tensor_unsupported,
)
from shared.adapter_format.values import MAX_RANK

Blocks = tuple[int, int]
DENSE: Blocks = (1, 1)
_BLOCKS = "set nblocks as in training"


def take_pair(
    draft: Draft, site: Site, roles: tuple[str, str] = ("lora_A.weight", "lora_B.weight")
) -> tuple[str, str] | None:
    """The names of A and B at `site`, None if there is neither."""
    a, b = (draft.take(site, role) for role in roles)
    if a is None and b is None:
        return None
    if a is None or b is None:
        missing = roles[0] if a is None else roles[1]
        raise tensor_invalid(a or b or "", f"its {missing.removesuffix('.weight')} is missing", SAVE_AGAIN)
    return a, b


def rank_and_scale(
    draft: Draft, site: Site, a: str, b: str, rows: int, columns: int, blocks: Blocks = DENSE, is_tied: bool = False
) -> tuple[int, float]:
    """Check A [rank, columns] and B [rows, rank], either with its second dimension divided by its number of blocks.

    The rank is A's first dimension. The scale is PEFT's: α/r, or α/√r with use_rslora, r and α by the first pattern
    in file order that matches. With `is_tied` A and B are another module's, whose rank they have; r remains this one's.

    Raises:
        AdapterInvalid: shape or dtype does not fit, or the rank is not what the config says.
        UnsupportedAdapter: the rank is above the limit, or the dtype is not served.
    """
    infos = [draft.tensors[name] for name in (a, b)]
    for name, info in zip((a, b), infos, strict=True):
        check_dtype(name, info)
        if len(info.shape) != 2 or 0 in info.shape:
            raise tensor_invalid(
                name,
                f"has shape {list(info.shape)}, not a matrix",
                "sharded training must gather weights before saving",
            )
    name = draft.names.module(site)
    promised = draft.ranks.value(name)
    if blocks == DENSE:
        _check_not_transposed(a, infos[0].shape, columns, promised, f"[r, {columns}]")
        _check_not_transposed(b, infos[1].shape[::-1], rows, promised, f"[{rows}, r]")
    rank = infos[0].shape[0]
    _check_columns(a, infos[0].shape, columns, blocks[0], "r")
    if rank % blocks[0] or rank % blocks[1]:
        raise tensor_invalid(a, f"has rank {rank}, which use_bdlora's nblocks does not divide", _BLOCKS)
    if rows % blocks[1]:
        raise tensor_invalid(b, f"has {rows} rows, which use_bdlora's nblocks does not divide", _BLOCKS)
    if infos[1].shape[0] != rows:
        problem = f"has shape {list(infos[1].shape)}, not [{rows}, {rank // blocks[1]}] as the base model takes"
        raise tensor_invalid(b, problem, OTHER_BASE)
    if infos[1].shape[1] != rank // blocks[1]:
        problem = f"has shape {list(infos[1].shape)}, not [{rows}, {rank // blocks[1]}]: its lora_A has rank {rank}"
        raise tensor_invalid(b, problem, _BLOCKS if blocks != DENSE else ONE_TRAINING)
    if rank > MAX_RANK:
        raise tensor_unsupported(a, "r", f"rank {rank} is above the limit of {MAX_RANK}; train with a smaller rank")
    if rank != promised and not is_tied:
        problem = f"has rank {rank}; adapter_config.json says {promised:g} (r or rank_pattern)"
        raise tensor_invalid(a, problem, RIGHT_RANK)
    return rank, draft.alphas.value(name) / (math.sqrt(promised) if draft.config.use_rslora else promised)


def _check_not_transposed(tensor: str, shape: tuple[int, ...], length: int, promised: float, form: str) -> None:
    """`shape` is [r, length], as A has it; B's is read backwards. `length` is no rank that the config promises."""
    if shape[0] == length != shape[1] and promised != length:
        raise tensor_invalid(tensor, f"is transposed: PEFT saves it as {form}", "transpose it, and save it again")


def _check_columns(tensor: str, shape: tuple[int, ...], columns: int, blocks: int, rows: str) -> None:
    if columns % blocks or shape[1] != columns // blocks:
        shown = f"{columns // blocks}" + (f" ({columns} in {blocks} blocks)" if blocks > 1 else "")
        raise tensor_invalid(
            tensor, f"has shape {list(shape)}, not [{rows}, {shown}] as the base model takes", OTHER_BASE
        )
