"""What penalties, biases and forbidden tokens need on the GPU: token counts and biases of the sequences that have any.

Counts go on by themselves: each step adds what it sampled, so that the next one can be launched before anybody has read
it. They are written anew only where they miss tokens: for a new sequence, and for one whose row went to another while
it was preempted.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_service.engine.sampler import has_penalties
from inference_service.engine.sequence import Sequence, State
from inference_service.engine.staging import Field, Staging
from inference_service.types import MAX_LOGIT_BIASES, MAX_OWN_EOS, MAX_STOP_TOKENS
from kernels import sampling

NEVER = float("-inf")
CELLS = 8192  # prompt tokens, and as many output tokens, in one copy of counts
BIAS_ROWS = 8  # sequences in one copy of biases


class AdjustedRow(NamedTuple):
    """Rows of the tables that a sequence's logits are adjusted by, −1 for none."""

    count_row: int
    bias_row: int


UNADJUSTED = AdjustedRow(-1, -1)


@dataclass(slots=True)
class Held:
    """A row and what is in it once all launched steps have run.

    Attributes:
        num_counted: Output tokens in the counts; −1: they are not there.
        forbidden_ids: Those among the biases; None: the biases are not there.
    """

    sequence: Sequence
    row: int
    num_counted: int = -1
    forbidden_ids: tuple[int, ...] | None = None


class AdjustedRows:
    """Tables on the device, one row for each sequence that has penalties, biases or forbidden tokens.

    All copies and kernels go to the current stream, in the order of the steps.

    Args:
        num_rows: At least the number of sequences in a step.
        vocab_size: Tokens.
        eos_ids: Of the base model, forbidden before `min_tokens`.
        device: The GPU.

    Attributes:
        token_counts: `[rows, vocab]` int32, see `kernels.sampling.Adjustments`.
        bias_ids, bias_values: `[rows, most]` int32 and float32.
    """

    def __init__(self, num_rows: int, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device) -> None:
        most = MAX_LOGIT_BIASES + MAX_STOP_TOKENS + len(eos_ids) + MAX_OWN_EOS
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self.token_counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        self._biases = torch.full((num_rows, 2, most), -1, dtype=torch.int32, device=device)  # ids beside values
        self.bias_ids, self.bias_values = self._biases[:, 0], self._biases[:, 1].view(torch.float32)
        self._counts = CountUpload(self.token_counts, device)
        self._bias_upload = BiasUpload(self._biases, device)
        self._free = list(range(num_rows))
        self._held: dict[int, Held] = {}  # by id of the sequence, which the entry keeps alive

    def place(self, sequences: Items[Sequence]) -> list[AdjustedRow]:
        """The rows of sequences whose next token is about to be sampled, brought up to date."""
        rows = [self._place(sequence) for sequence in sequences]
        self._counts.flush()
        self._bias_upload.flush()
        return rows

    def _place(self, sequence: Sequence) -> AdjustedRow:
        if sequence.request.spec.extra_vocab:  # its tokens go beyond these tables: see `CudaRunner._sample_wide`
            return UNADJUSTED
        bias, penalized = sequence.request.spec.sampling.logit_bias, has_penalties(sequence.request.spec.sampling)
        forbidden = sequence.forbidden_ids(self._eos_ids)
        if not (penalized or bias or forbidden):
            return UNADJUSTED
        held = self._held.get(id(sequence)) or self._hold(sequence)
        if penalized:
            if held.num_counted != sequence.position:
                self._count_anew(held)
            held.num_counted = sequence.position + 1
        if (bias or forbidden) and held.forbidden_ids != forbidden:
            self._bias_upload.add(held.row, {**bias, **dict.fromkeys(forbidden, NEVER)})
            held.forbidden_ids = forbidden
        return AdjustedRow(held.row if penalized else -1, held.row if bias or forbidden else -1)

    def _hold(self, sequence: Sequence) -> Held:
        if not self._free:  # no more sequences run than there are rows
            for held in [h for h in self._held.values() if h.sequence.state is not State.RUNNING]:
                del self._held[id(held.sequence)]
                self._free.append(held.row)
        self._held[id(sequence)] = held = Held(sequence, self._free.pop())
        return held

    def _count_anew(self, held: Held) -> None:
        """The row is new, or the sequence was waiting: all tokens before the next sample have been read."""
        sequence, base = held.sequence, held.row * self._vocab_size
        assert sequence.num_output == sequence.position
        marks_prompt = sequence.request.spec.sampling.repetition_penalty != 1.0
        prompt = sequence.token_ids[: sequence.num_prompt] if marks_prompt else []
        self.token_counts[held.row].zero_()
        self._counts.add("prompt_cells", np.array(prompt, np.int64) + base)
        self._counts.add("output_cells", np.array(sequence.token_ids[sequence.num_prompt :], np.int64) + base)


class CountUpload:
    """Cells of the counts on their way to the device: prompt tokens to be marked, output tokens to be added."""

    def __init__(self, token_counts: Tensor, device: torch.device) -> None:
        self._token_counts = token_counts
        layout = (Field("prompt_cells", np.int64, (CELLS,)), Field("output_cells", np.int64, (CELLS,)))
        self._staging = Staging(layout, device)
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._used = {field.name: 0 for field in layout}

    def add(self, name: str, cells: npt.NDArray[np.int64]) -> None:
        """Queue `cells` for the field `name`; what does not fit goes in several copies, in order."""
        while cells.size:
            if self._used[name] == CELLS:
                self.flush()
            self._arrays = self._arrays or self._staging.begin()
            used = self._used[name]
            taken = min(cells.size, CELLS - used)
            self._arrays[name][used : used + taken] = cells[:taken]
            self._used[name] = used + taken
            cells = cells[taken:]

    def flush(self) -> None:
        """Bring what is queued into the counts."""
        if not self._arrays:
            return
        self._staging.commit()
        sampling.set_counts(
            self._token_counts, *(self._staging.device[name][:used] for name, used in self._used.items())
        )
        self._arrays = {}
        self._used = dict.fromkeys(self._used, 0)


class BiasUpload:
    """Whole rows of biases on their way to the device."""

    def __init__(self, biases: Tensor, device: torch.device) -> None:
        self._biases = biases
        layout = (
            Field("rows", np.int64, (BIAS_ROWS,)),
            Field("entries", np.int32, (BIAS_ROWS, *biases.shape[1:])),
        )
        self._staging = Staging(layout, device)
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._used = 0

    def add(self, row: int, biases: dict[int, float]) -> None:
        """Queue `row`'s biases by token id, which replace what it holds."""
        if self._used == BIAS_ROWS:
            self.flush()
        self._arrays = self._arrays or self._staging.begin()
        ids, values = self._arrays["entries"][self._used]
        ids[: len(biases)] = list(biases)
        ids[len(biases) :] = -1
        values.view(np.float32)[: len(biases)] = list(biases.values())
        self._arrays["rows"][self._used] = row
        self._used += 1

    def flush(self) -> None:
        """Bring what is queued into the table."""
        if not self._used:
            return
        self._staging.commit(self._used)
        on_device = self._staging.device
        self._biases.index_copy_(0, on_device["rows"][: self._used], on_device["entries"][: self._used])
        self._arrays, self._used = {}, 0
