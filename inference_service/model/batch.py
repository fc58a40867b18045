"""What one forward pass works on."""

from dataclasses import dataclass

from torch import Tensor

from kernels.table import Chunks


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
    lora: object | None = None  # handed to every module as it is; the model does not look inside
    logit_lora: object | None = None  # the same of `logit_rows`, for what comes behind the last layer


@dataclass(frozen=True)
class DeviceBatch:
    """One step's input for the fused forward pass: all lengths are device data, so that a graph can be replayed.

    The first `num_decodes` token rows are one sequence each; the others belong to prefill chunks. Padding rows have the
    KV slot −1; padding sequences have the length 0.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int32
    kv_slots: Tensor  # [tokens] int64, −1: nothing is stored
    block_tables: Tensor  # [seqs, max_blocks] int32
    seq_lens: Tensor  # [seqs] int32, tokens in the KV cache after this step
    query_starts: Tensor  # [seqs - num_decodes + 1] int32, rows of the prefill chunks after the decodes
    num_decodes: int
    max_len: int  # host bound of seq_lens
    logit_rows: Tensor | None  # [rows] int64; None: all rows
    chunks: Chunks | None  # which adapter each row uses; None: the base model alone
