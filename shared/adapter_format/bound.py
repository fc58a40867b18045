"""What binding an adapter to its base model results in: which tensor of the file acts where. Data only.

Every field beyond the linears' is empty for a plain LoRA. `kinds` says which of them are not.
"""

from typing import Literal, NamedTuple

FINAL_NORM = -1  # the layer of the norm behind the last one


class ModuleBinding(NamedTuple):
    """One adapted linear: y += scale · B(A x). `a` [rank, in] and `b` [out, rank] are tensor names.

    `module` indexes `shared.base_model.MODULES`; `path` is the linear's name in the base checkpoint.
    `blocks`: of how many blocks on the diagonal A and B consist; 1 is dense. With n blocks the file holds them
    stacked: A as [rank, in / n], whose row chunk i acts on column chunk i; B as [out, rank / n] likewise.
    """

    layer: int
    module: int
    path: str
    rank: int
    scale: float
    a: str
    b: str
    blocks: tuple[int, int] = (1, 1)


class VectorBinding(NamedTuple):
    """One vector [out] of the linear `module` in `layer`.

    magnitude: DoRA's m; y = m / ‖W + scale · BA‖ per output row ⊙ (W x + scale · B(A x)) + bias.
    lora_bias: on B; y += scale · it, scaled by DoRA's gain with DoRA.
    bias: the linear's whole bias, in place of the base model's; also of linears without `ModuleBinding`.
    """

    layer: int
    module: int
    kind: Literal["magnitude", "lora_bias", "bias"]
    tensor: str


class RowsBinding(NamedTuple):
    """Rows [n, hidden] that stand in place of the embedding's or the head's.

    `ids`: the token id of each row, ascending as the file has them or not; None where `tensor` is the whole matrix
    [vocabulary + extra, hidden], of which the rows that differ from the base model's count.
    `source`: "copy" is what PEFT saves beside a LoRA on the embedding or the head, as a rule with no row that differs;
    "added" is the same where the vocabulary grew.
    """

    tensor: str
    ids: tuple[int, ...] | None
    source: Literal["trainable_tokens", "modules_to_save", "copy", "added"]


class EmbedBinding(NamedTuple):
    """What acts on embed_tokens: row i of `rows` or of the base, plus scale · B A[:, i], scaled by DoRA.

    `a` [rank, vocabulary + extra], `b` [hidden, rank], `magnitude` [hidden] (the norm is taken over the vocabulary).
    `grown`: where trainable tokens (`rows`) act on a vocabulary that grew, the whole matrix beneath them.
    """

    a: str | None = None
    b: str | None = None
    rank: int = 0
    scale: float = 0.0
    magnitude: str | None = None
    rows: RowsBinding | None = None
    grown: RowsBinding | None = None


class HeadBinding(NamedTuple):
    """What acts on lm_head, as on a linear: `a` [rank, hidden], `b` [vocabulary + extra, rank]; the vectors as B has
    rows. `rows` and `grown` as in `EmbedBinding`; a tied head that sees the embedding's rows names the same tensors.
    `blocks` as in `ModuleBinding`. `is_embedding`: A and B must be the embedding's, transposed (ensure_weight_tying).
    """

    a: str | None = None
    b: str | None = None
    rank: int = 0
    scale: float = 0.0
    magnitude: str | None = None
    lora_bias: str | None = None
    bias: str | None = None
    rows: RowsBinding | None = None
    grown: RowsBinding | None = None
    blocks: tuple[int, int] = (1, 1)
    is_embedding: bool = False


class NormBinding(NamedTuple):
    """The weight of one norm in place of the base model's. `layer` is FINAL_NORM for the one named `norm`."""

    layer: int
    name: Literal["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"]
    tensor: str


class BindingPlan(NamedTuple):
    """The adapted linears in order of (layer, module), and all else that the adapter changes.

    `rank`: the greatest of the linears', 0 without any.
    `unread`: tensors of the file that PEFT writes and does not read.
    `extra_vocab`: token ids beyond the base model's that the adapter adds.
    `activation`: the token sequence behind whose last occurrence, it included, the adapter acts; empty: everywhere.
    `kinds`: what the adapter is made of, in the words of `served.py`.
    """

    modules: tuple[ModuleBinding, ...]
    rank: int
    num_tensors: int
    warnings: tuple[str, ...]
    vectors: tuple[VectorBinding, ...] = ()
    embed: EmbedBinding | None = None
    head: HeadBinding | None = None
    norms: tuple[NormBinding, ...] = ()
    unread: tuple[str, ...] = ()
    extra_vocab: int = 0
    activation: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ("lora",)
