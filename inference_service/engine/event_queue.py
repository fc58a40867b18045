"""The events of one request on their way to a reader that may be slow."""

import asyncio
from collections import deque

from inference_service.types import PromptLogprobs, SequenceDelta, Started
from shared.errors import ClientTooSlow, LoraplexError

Event = Started | PromptLogprobs | SequenceDelta
MAX_UNREAD = 65_536


def merge(first: SequenceDelta, second: SequenceDelta) -> SequenceDelta:
    """Two successive deltas of one sequence as one."""
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or [])
    token_ids = first.token_ids + second.token_ids
    return SequenceDelta(first.request_id, first.index, token_ids, logprobs, second.finish_reason, second.matched_token)


def num_entries(event: Event) -> int:
    """Tokens and logprobs of a delta, which is what a queue of them weighs. Others come once."""
    if not isinstance(event, SequenceDelta):
        return 0
    return len(event.token_ids) + sum(1 + len(token.top) for token in event.logprobs or ())


class EventQueue:
    """Events of one request, in order; deltas not taken yet are merged, so a slow reader costs little memory.

    `max_unread`: tokens and logprobs that may wait; with more the request ends, and what waited is forgotten.
    """

    def __init__(self, num_sequences: int, max_unread: int = MAX_UNREAD) -> None:
        self.unfinished = set(range(num_sequences))
        self._max_unread = max_unread
        self._num_unread = 0
        self._events: deque[Event] = deque()
        self._error: LoraplexError | None = None
        self._changed = asyncio.Event()

    def put(self, event: Event) -> bool:
        """Add an event; False if that was one too many. Deltas of a sequence that has ended are ignored."""
        if isinstance(event, SequenceDelta):
            if event.index not in self.unfinished:
                return True
            if event.finish_reason is not None:
                self.unfinished.discard(event.index)
        self._num_unread += num_entries(event)
        if self._num_unread > self._max_unread:
            self._events.clear()
            self._num_unread = 0
            self.fail(ClientTooSlow(f"the client left more than {self._max_unread} tokens and logprobs unread"))
            return False
        self._append(event)
        self._changed.set()
        return True

    def fail(self, error: LoraplexError) -> None:
        """End the stream with `error`, after what is queued."""
        self._error = error
        self.unfinished.clear()
        self._changed.set()

    def abandon(self, index: int) -> None:
        """Expect no more of a sequence, and forget what is queued of it."""
        self.unfinished.discard(index)
        self._events = deque(e for e in self._events if not (isinstance(e, SequenceDelta) and e.index == index))
        self._num_unread = sum(map(num_entries, self._events))
        self._changed.set()

    async def get(self) -> Event | None:
        """The next event, or None when all sequences have ended.

        Raises:
            LoraplexError: The request failed.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                return None
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        self._num_unread -= num_entries(event)
        return event

    def _append(self, event: Event) -> None:
        if isinstance(event, SequenceDelta):
            for position, queued in enumerate(self._events):
                if isinstance(queued, SequenceDelta) and queued.index == event.index:
                    self._events[position] = merge(queued, event)
                    return
        self._events.append(event)
