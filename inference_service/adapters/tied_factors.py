"""ensure_weight_tying: the head's factors must be the embedding's. PEFT writes both, and holds them once."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.adapter_format.bound import HeadBinding
from shared.adapter_format.reasons import tensor_invalid


def check_tied(head: HeadBinding | None, stored: Callable[[str], NDArray[Any]]) -> None:
    """Of factors that differ PEFT would take either for both, by the order in which it loads them.

    Args:
        head: Of the adapter.
        stored: The factors by `types.ExtraLayout`'s names, as a blob has them.

    Raises:
        AdapterInvalid: they differ (metadata `tensor`).
    """
    if head is None or not head.is_embedding or head.a is None or head.b is None:
        return
    # embed.a [vocabulary, rank], embed.b [rank, hidden]; head.a [rank, hidden], head.b [rank, vocabulary]
    for tensor, own, tied in (
        (head.a, stored("head.a"), stored("embed.b")),
        (head.b, stored("head.b"), stored("embed.a").T),
    ):
        if not np.array_equal(own, tied):
            problem = "is not embed_tokens' transposed, to which ensure_weight_tying ties it"
            raise tensor_invalid(tensor, problem, "set ensure_weight_tying as in training")
