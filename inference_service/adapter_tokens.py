"""Tokens served by adapter, under labels of which there are never more than a metrics server bears."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from inference_service.stats import TokenCounts

MAX_LABELS = 100
IDLE_SECONDS = 900.0  # after which an adapter's label may go to another
OTHER, BASE_MODEL = "other", "base model"  # adapters' names have a slash


@dataclass
class _Labelled:
    tokens: TokenCounts
    served_at: float


class AdapterTokens:
    """Sums of what engines have served, by the names of adapters.

    Names have labels of their own while there are fewer than `max_labels` of them, or one was not served for long; the
    tokens of the rest are added up. What is shown under a label only grows, until the label is gone.
    """

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._labelled: OrderedDict[str, _Labelled] = OrderedDict()  # least recently served first
        self._other = TokenCounts()
        self._seen: dict[str, TokenCounts] = {}

    def update(self, counted: Mapping[str, TokenCounts], names: Mapping[str, str], now: float) -> None:
        """An engine has served this by digest ("" is the base model) since it started. `names`: those that are known.

        A count that falls or is new began at 0: the engine was started again, or had forgotten the adapter.
        """
        for digest, tokens in counted.items():
            before = self._seen.get(digest, TokenCounts())
            if tokens.prompt < before.prompt or tokens.generated < before.generated:
                before = TokenCounts()
            prompt, generated = tokens.prompt - before.prompt, tokens.generated - before.generated
            if prompt or generated:
                total = self._total(names.get(digest) if digest else BASE_MODEL, now)
                total.prompt += prompt
                total.generated += generated
        self._seen = dict(counted)

    def totals(self) -> dict[str, TokenCounts]:
        """By label."""
        shown = {name: labelled.tokens for name, labelled in self._labelled.items()} | {OTHER: self._other}
        return {name: TokenCounts(tokens.prompt, tokens.generated) for name, tokens in shown.items()}

    def _total(self, name: str | None, now: float) -> TokenCounts:
        """What to add to."""
        if name is None:
            return self._other
        found = self._labelled.get(name)
        if found is None:
            if len(self._labelled) >= self._max_labels and not self._drop_idle(now):
                return self._other
            found = self._labelled[name] = _Labelled(TokenCounts(), now)
        found.served_at = now
        self._labelled.move_to_end(name)
        return found.tokens

    def _drop_idle(self, now: float) -> bool:
        """Whether there is room for another label now."""
        oldest = next(iter(self._labelled))
        if now - self._labelled[oldest].served_at < IDLE_SECONDS:
            return False
        del self._labelled[oldest]
        return True
