"""One budget for the device's memory: weights, activations, graphs, the adapters' arena, the KV cache. Torch-free.

What is free is measured, after the weights are there and a step of the largest size has run; nothing is guessed from
what the machine says it has. Explicit sizes win; what is left of the share of the device goes to the KV cache.
"""

from typing import NamedTuple

from inference_service.types import MemoryBudget
from shared.errors import InvalidArgument

MIB = 1 << 20
CPU_KV_BYTES = 512 * MIB
CPU_ADAPTER_BYTES = 256 * MIB
ADAPTER_SHARE = 8  # the arena takes one in so many bytes of what weights and steps leave
MOST_ADAPTER_BYTES = 8 << 30
GRAPH_BYTES = 1 << 30  # captured graphs, and libraries' workspaces that come with them
LOGIT_COPIES = 4  # of a full batch's float32 logits: penalties, softmax and sorting while sampling


class Device(NamedTuple):
    """A device after a step of the largest size: `free` of `total` bytes, and what took the rest.

    `activations` is the peak above `weights`; PyTorch keeps it, so that `free` is without it.
    """

    total: int
    free: int
    weights: int
    activations: int


class Wanted(NamedTuple):
    """Settings: the share of the device that one engine may fill, and sizes in bytes, None to be chosen."""

    fraction: float
    kv_cache: int | None
    adapters: int | None


def graph_reserve(max_num_seqs: int, vocab_size: int, captured_step: int) -> int:
    """Bytes kept for what is allocated once the KV cache is there: captured graphs, what the largest captured step
    takes (`captured_step`), and sampling."""
    return GRAPH_BYTES + captured_step + LOGIT_COPIES * 4 * max_num_seqs * vocab_size


def divide(device: Device, wanted: Wanted, block_bytes: int, reserve: int, host_arena: int) -> MemoryBudget:
    """Divide a GPU's memory.

    Args:
        device: What there is.
        wanted: What the settings say.
        block_bytes: Keys and values of one block of tokens.
        reserve: See `graph_reserve`.
        host_arena: Bytes of host memory for packed adapters, which the budget only states.

    Raises:
        InvalidArgument: it does not fit; names the setting that is too large.
    """
    share = int(device.total * wanted.fraction) - (device.total - device.free) - reserve
    there_is = device.free - reserve  # explicit sizes may go beyond the share, not beyond the device
    adapters = wanted.adapters
    if adapters is None:
        rest = share if wanted.kv_cache is None else min(share, there_is - wanted.kv_cache)
        adapters = max(min(rest // ADAPTER_SHARE, MOST_ADAPTER_BYTES), 0)
    kv_cache = max(share - adapters, 0) if wanted.kv_cache is None else wanted.kv_cache
    _check_block(wanted.kv_cache, block_bytes)
    # One block more than requests get: scratch.
    num_blocks = kv_cache // block_bytes - (wanted.kv_cache is None)
    taken = adapters + (num_blocks + 1) * block_bytes
    if taken > there_is or num_blocks < 1:
        raise _too_much(wanted, block_bytes, there_is, device)
    return MemoryBudget(
        total=device.total,
        other=device.total - device.free - device.weights - device.activations,
        weights=device.weights,
        activations=device.activations,
        reserve=reserve,
        adapter_arena=adapters,
        kv_cache=(num_blocks + 1) * block_bytes,
        num_blocks=num_blocks,
        host_arena=host_arena,
    )


def divide_host(weights: int, wanted: Wanted, block_bytes: int, host_arena: int) -> MemoryBudget:
    """The budget where the model runs on a CPU: the sizes that are set, or small ones; how much memory a machine can
    give is not to be known.

    Raises:
        InvalidArgument: no block fits `kv_cache_memory`.
    """
    _check_block(wanted.kv_cache, block_bytes)
    num_blocks = max((wanted.kv_cache or CPU_KV_BYTES) // block_bytes, 1)
    return MemoryBudget(
        weights=weights,
        adapter_arena=wanted.adapters or CPU_ADAPTER_BYTES,
        kv_cache=(num_blocks + 1) * block_bytes,
        num_blocks=num_blocks,
        host_arena=host_arena,
    )


def describe(budget: MemoryBudget) -> str:
    """The budget as one line of a log."""
    parts = (
        ("weights", budget.weights),
        ("activations", budget.activations),
        ("graphs and sampling", budget.reserve),
        ("adapters", budget.adapter_arena),
        ("keys and values", budget.kv_cache),
        ("other", budget.other),
    )
    stated = ", ".join(f"{name} {nbytes / MIB:,.0f}" for name, nbytes in parts if nbytes)
    rest = f", unused {budget.unused / MIB:,.0f} of {budget.total / MIB:,.0f}" if budget.total else ""
    return f"device memory in MiB: {stated}{rest}; host memory for adapters {budget.host_arena / MIB:,.0f}"


def _check_block(kv_cache: int | None, block_bytes: int) -> None:
    if kv_cache is not None and kv_cache < block_bytes:
        raise InvalidArgument.of("kv_cache_memory", f"is {kv_cache} bytes; one block of tokens takes {block_bytes}")


def _too_much(wanted: Wanted, block_bytes: int, there_is: int, device: Device) -> InvalidArgument:
    """Name what to change: the larger of the sizes that were set, or the share of the device."""
    facts = (
        f"of the device's {device.total // MIB} MiB, {device.free // MIB} are free beside weights "
        f"({device.weights // MIB}) and activations ({device.activations // MIB})"
    )
    kv_cache, adapters = wanted.kv_cache or 0, wanted.adapters or 0
    would_fit = there_is - adapters >= 2 * block_bytes  # if the whole device were ours
    if wanted.kv_cache is None and (not wanted.adapters or would_fit):
        text = f"{wanted.fraction} leaves no room for keys and values: {facts}; raise it, or lower max_batched_tokens"
        return InvalidArgument.of("memory_fraction", text)
    if kv_cache >= adapters:
        field, size, other = "kv_cache_memory", kv_cache, adapters
    else:
        field, size, other = "adapter_memory", adapters, kv_cache
    left = max(there_is - other, 0) // MIB
    return InvalidArgument.of(field, f"{size // MIB} MiB do not fit into the {left} that there are for it: {facts}")
