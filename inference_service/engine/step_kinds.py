"""Which kinds of steps there are on a GPU: a step's launches depend on its kind alone, all else is device data."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kernels.lora import rows_per_chunk
from kernels.table import MAX_RANK, SMALL_RANK

SHORT = 2048  # of a sequence that decodes
FEW_DECODES = 32  # beside prefill: attention over more of them is split less
MOST_PREFILLS = 16  # of a captured step; every chunk costs each layer a few programs, whether it is there or not
# Of a captured step: above, the GPU takes longer than the host does to launch kernel by kernel. With adapters the host
# has more than twice as much to do.
MOST_TOKENS, MOST_BASE_TOKENS = 2048, 1024


class Kind(NamedTuple):
    """What a step's launches depend on, and what a captured step therefore fixes.

    Attributes:
        num_tokens: Rows, padding included.
        max_decodes: At most so many sequences decode; their rows come first.
        max_prefills: At most so many chunks of prompts follow; 0: all rows decode, and each samples.
        max_len: No sequence that decodes is longer.
        max_rank: No adapter has a larger one; 0: the base model alone.
        has_affine: Whether adapters may have gains and offsets (`kernels.affine`).
    """

    num_tokens: int
    max_decodes: int
    max_prefills: int
    max_len: int
    max_rank: int
    has_affine: bool = False

    @property
    def is_decode(self) -> bool:
        return self.max_prefills == 0


def batch_buckets(most: int) -> tuple[int, ...]:
    """Rows of captured decode steps: 1, 2, 4, 8, then steps of 16, 32 and 64; `most` is one."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, most + 1, 64)]
    return (*(size for size in sizes if size < most), most)


def token_buckets(most: int) -> tuple[int, ...]:
    """Rows of captured steps with prefill: steps of 64 and 128; the largest step's are one, if few enough."""
    most = min(most, MOST_TOKENS)
    sizes = [*range(64, 512, 64), *range(512, MOST_TOKENS + 1, 128)]
    return (*(size for size in sizes if size < most), most)


def length_classes(max_model_len: int) -> tuple[int, ...]:
    """Bounds of a step's longest sequence that are captured. Attention splits long ones over more programs, which costs
    a batch of short ones 5 % of its step (`kernels.paged_decode_triton.num_splits`)."""
    return (SHORT, max_model_len) if max_model_len > SHORT else (max_model_len,)


def rank_class(max_rank: int, num_tokens: int) -> int:
    """The bound that the kernels for `num_tokens` rows tell apart; see `rank_classes`."""
    return next(bound for bound in rank_classes(num_tokens) if bound >= max_rank)


def rank_classes(num_tokens: int) -> tuple[int, ...]:
    """None, then all; few rows have kernels of their own for small ranks."""
    return (0, SMALL_RANK, MAX_RANK) if rows_per_chunk(num_tokens) == 1 else (0, MAX_RANK)


class StepKinds:
    """The kinds that are captured, and which one a step is.

    Args:
        max_num_seqs: Sequences in one step.
        max_batched_tokens: Tokens in one step.
        max_model_len: Tokens of one sequence.
    """

    def __init__(self, max_num_seqs: int, max_batched_tokens: int, max_model_len: int) -> None:
        self.buckets = batch_buckets(max_num_seqs)
        self.token_buckets = token_buckets(max_batched_tokens)
        self.length_classes = length_classes(max_model_len)
        self._decode_bounds = tuple(sorted({min(FEW_DECODES, max_num_seqs), max_num_seqs}))
        self._max_num_seqs = max_num_seqs

    def most_captured(self, max_rank: int = MAX_RANK) -> int:
        """Tokens of the largest captured step with prefill, of the base model alone where `max_rank` is 0."""
        most = MOST_TOKENS if max_rank else MOST_BASE_TOKENS
        return max(rows for rows in self.token_buckets if rows <= most)

    def decode(self, num_seqs: int, longest: int, max_rank: int, has_affine: bool = False) -> Kind:
        """Of a step in which every sequence decodes and samples; `longest`: tokens of the longest one."""
        rows = _bound(self.buckets, num_seqs)
        if has_affine:
            return self._affine(rows)
        return Kind(rows, rows, 0, _bound(self.length_classes, longest), rank_class(max_rank, rows))

    def mixed(
        self, num_tokens: int, num_decodes: int, num_prefills: int, max_rank: int, has_affine: bool = False
    ) -> Kind:
        """Of any step: a captured one where it is small enough, else that of its own size."""
        if has_affine or num_tokens > self.most_captured(max_rank):
            return self.exact(num_tokens, num_decodes, num_prefills, max_rank, has_affine)
        rows = _bound(self.token_buckets, num_tokens)
        if num_prefills > self._most_prefills(rows):
            return self.exact(num_tokens, num_decodes, num_prefills, max_rank)
        return self._captured(rows, _bound(self._decode_bounds, num_decodes), rank_class(max_rank, rows))

    def exact(
        self, num_tokens: int, num_decodes: int, num_prefills: int, max_rank: int, has_affine: bool = False
    ) -> Kind:
        """Of a step that is not captured. It has no padding, but for rows of decodes that are not there."""
        decodes = _bound(self._decode_bounds, num_decodes) if num_decodes else 0
        rows = max(num_tokens, decodes)
        ranks = MAX_RANK if has_affine else rank_class(max_rank, rows)
        return Kind(rows, decodes, max(num_prefills, 1), self.length_classes[-1], ranks, has_affine)

    def captured(self) -> Iterator[Kind]:
        """All of them, the largest first, in whose memory the others find room."""
        for rows in reversed(self.token_buckets):
            bounds = dict.fromkeys(min(bound, rows) for bound in self._decode_bounds)
            ranks = (rank for rank in rank_classes(rows) if rows <= self.most_captured(rank))
            for decodes, max_rank in product(bounds, ranks):
                yield self._captured(rows, decodes, max_rank)
        for rows in reversed(self.buckets):
            for max_len, max_rank in product(self.length_classes, rank_classes(rows)):
                yield Kind(rows, rows, 0, max_len, max_rank)
            yield self._affine(rows)

    def _affine(self, rows: int) -> Kind:
        """Of decodes with gains and offsets: one for all lengths and ranks, since few such adapters are served."""
        return Kind(rows, rows, 0, self.length_classes[-1], MAX_RANK, has_affine=True)

    def _captured(self, rows: int, decodes: int, max_rank: int) -> Kind:
        return Kind(rows, min(decodes, rows), self._most_prefills(rows), self.length_classes[-1], max_rank)

    def _most_prefills(self, rows: int) -> int:
        """Chunks of prompts have two tokens or more; what is one token long counts as a decode."""
        return max(min(MOST_PREFILLS, rows // 2, self._max_num_seqs), 1)


def _bound(bounds: tuple[int, ...], value: int) -> int:
    return next(bound for bound in bounds if bound >= value)
