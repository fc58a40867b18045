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

    First there is one token row for each sequence that decodes, then come the rows of prefill chunks, then padding.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int32
    kv_slots: Tensor  # [tokens] int64, −1 (in padding): nothing is stored
    block_tables: Tensor  # [any, max_blocks] int32, by sequence: first those that decode, then those of the chunks
    seq_lens: Tensor  # [any] int32, likewise: tokens in the KV cache after this step
    decode_lens: Tensor  # [most] int32: as seq_lens where a sequence decodes, −1 behind these; none: nobody decodes
    query_starts: Tensor | None  # [most + 1] int32, rows of the chunks, the last one repeated; None: there are none
    max_len: int  # host bound of decode_lens
    chunks: Chunks | None  # which adapter each row uses; None: the base model alone
