"""What one forward pass works on."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """One step's input, gathered afresh for each step. Tensors lie on the model's device.

    Sequences follow each other in `token_ids`; sequence s owns the token rows `query_starts[s]:query_starts[s + 1]`,
    at least one. The first `num_decodes` sequences have exactly one token each.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, counted from the start of the sequence
    kv_slots: Tensor  # [tokens] int64, block * block_size + offset: where each token's K and V go
    query_starts: tuple[int, ...]  # seqs + 1 row numbers
    context_lens: tuple[int, ...]  # tokens of each sequence in the KV cache after this step
    block_tables: Tensor  # [seqs, max_blocks] int32, padded with 0
    num_decodes: int
    logit_rows: Tensor  # [rows] int64, the token rows whose logits are wanted
    lora: object | None = None  # handed to every projection as it is; the model does not look inside
