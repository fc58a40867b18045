"""What the registry said of references, and for how long that may be believed.

Without a watch an answer is believed for its ttl. A watch that is heard says that whatever it did not report is as it
was, so each time it is heard the ttl begins anew; what it reports as changed is not believed from then on.

A watch that cannot be resumed begins anew, maybe with another database. What was answered before then is `unconfirmed`
until it is asked for again, and serves only while there is no other answer. The watch of a process before this one can
be resumed too: then those saved answers are right that nothing has changed since.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from inference_service.adapters.adapter_change import AdapterChange
from inference_service.adapters.resolution import Resolution
from inference_service.adapters.saved_answers import SavedAnswers

MAX_ANSWERS = 50_000
MAX_CHANGES = 50_000


class Answer(NamedTuple):
    """What a reference meant when the registry was asked, and the registry's revision then.

    `is_earlier`: a process before this one asked, or another watch was heard then. It is never believed, only served
    while there is no other.
    """

    resolution: Resolution
    asked_at: float
    revision: int
    is_earlier: bool = False


class _Changes(NamedTuple):
    """What was told of one adapter: `last` is how it is now, with all `deleted_versions`."""

    last: AdapterChange
    deleted_at: int  # revision of the last deletion of all of it; 0: none was told


class Answers:
    """An LRU of answers by canonical reference.

    Args:
        max_stale: Seconds for which an answer that is not believed any more serves while the registry is unreachable.
        clock: Seconds, monotonic.
        saved: Keeps answers for a process after this one.
    """

    def __init__(
        self, max_stale: float, clock: Callable[[], float] = time.monotonic, saved: SavedAnswers | None = None
    ) -> None:
        self.revision = 0  # the highest that the registry has told
        self.era = 0  # what was read of the saved answers in another one may be gone
        self._max_stale = max_stale
        self._clock = clock
        self._saved = saved
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._changes: dict[str, _Changes] = {}  # by adapter that the watch told of
        self._watched_since = math.inf  # revision from which on the watch has told every change
        self._heard_at = -math.inf
        self._confirmed = 0  # everything up to this revision was told by the watch
        self._nothing_before = -math.inf  # answers to what was asked earlier are not believed
        self._began_at = -math.inf  # when the watch last had to begin anew
        self._oldest = 0  # where the watch began; an older answer may be of what was gone by then

    def find(self, reference: str) -> Answer | None:
        """The last answer, however old; None if what it names was deleted since."""
        answer = self._answers.get(reference)
        if answer is None or self._is_ended(reference, answer):
            return None
        self._answers.move_to_end(reference)
        return answer

    def is_believed(self, reference: str, answer: Answer) -> bool:
        """Whether the answer is as good as a new one."""
        if answer.is_earlier or answer.asked_at <= self._nothing_before or self._is_changed(reference, answer):
            return False
        return self._clock() < self._right_at(answer) + answer.resolution.ttl

    def may_serve(self, answer: Answer) -> bool:
        """Whether the answer is young enough to serve while there is no other."""
        return self._clock() <= self._right_at(answer) + self._max_stale

    def put(self, reference: str, answer: Answer, response: bytes = b"") -> None:
        """The registry has answered; `response` is the message."""
        if answer.asked_at <= self._began_at:
            return  # its revision may be another database's
        self.revision = max(self.revision, answer.revision)
        if answer.revision < self._oldest:
            return
        self._keep(reference, answer)
        if self._saved is not None and not self._is_changed(reference, answer):
            self._saved.put(reference, _adapter(reference), response, is_watched=self._is_watched(answer))

    def put_earlier(self, reference: str, resolution: Resolution, age: float) -> None:
        """What the registry has told a process before this one, and was right `age` seconds ago.

        To be read of the saved answers in this era.
        """
        self._keep(reference, Answer(resolution, self._clock() - age, 0, is_earlier=True))

    def _keep(self, reference: str, answer: Answer) -> None:
        self._answers[reference] = answer
        self._answers.move_to_end(reference)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def drop(self, reference: str) -> None:
        """The registry has said that the reference means nothing."""
        self._answers.pop(reference, None)
        if self._saved is not None:
            self._saved.drop(reference)

    def required_revision(self, reference: str) -> int:
        """How new an answer must be: not before the watch began, nor before the last change that was told."""
        changes = self._changes.get(_adapter(reference))
        return self._oldest if changes is None else max(changes.last.revision, self._oldest)

    async def unconfirmed(self) -> list[str]:
        """References with answers of before the watch began: nothing has told what was gone by then. Without a watch it
        is too early to ask."""
        if math.isinf(self._watched_since):
            return []
        found = dict.fromkeys([] if self._saved is None else await self._saved.unconfirmed())
        for reference, answer in self._answers.items():
            if answer.is_earlier or answer.revision < self._watched_since:
                found[reference] = None
        return list(found)

    async def saved_token(self) -> str:
        """Resumes the watch of the process that saved the answers; empty if there are none, or if nothing does."""
        return "" if self._saved is None else await self._saved.token()

    # ---- what the watch tells

    def watching(self, revision: int) -> None:
        """From now on the watch tells every change after `revision`."""
        self._watched_since = revision

    def changed(self, change: AdapterChange) -> None:
        """An adapter is another one."""
        if len(self._changes) >= MAX_CHANGES:
            self._drop_ended()
            self._changes.clear()
            self.era += 1
            self._nothing_before = self._clock()
            self._watched_since = max(self._watched_since, self.revision)
            if self._saved is not None:
                self._saved.doubt()
        before, deleted_at, gone = self._changes.get(change.adapter), 0, change.deleted_versions
        if before is not None:
            deleted_at, gone = before.deleted_at, gone | before.last.deleted_versions
        last = change._replace(is_deleted=False, deleted_versions=gone)
        self._changes[change.adapter] = _Changes(last, change.revision if change.is_deleted else deleted_at)
        if self._saved is not None:
            self._saved.changed(change.adapter, change.ends_response)

    def confirmed(self, revision: int, token: str = "") -> None:
        """The watch has told everything up to `revision`, which is now. `token` resumes it."""
        self.revision = max(self.revision, revision)
        self._confirmed = revision
        self._heard_at = self._clock()
        if self._saved is not None:
            self._saved.heard(token)

    @property
    def lag(self) -> int:
        """Revisions that the registry is known to have and that the watch has not told."""
        return max(self.revision - self._confirmed, 0)

    @property
    def heard_at(self) -> float | None:
        """When the watch last told that everything is known; None if it never has."""
        return None if math.isinf(self._heard_at) else self._heard_at

    def start_over(self) -> None:
        """What the watch told before counts no more, and neither does any answer; revisions may begin anew.

        Answers for what was deleted are dropped, the others are to be confirmed.
        """
        self._drop_ended()
        for reference, answer in list(self._answers.items()):
            self._answers[reference] = answer._replace(asked_at=self._right_at(answer), revision=0, is_earlier=True)
        self.era += 1
        self.revision = self._confirmed = self._oldest = 0
        self._changes.clear()
        self._began_at = self._clock()
        self._watched_since = math.inf
        self._nothing_before = self._clock()
        if self._saved is not None:
            self._saved.doubt()

    def begun_anew(self) -> None:
        """The watch that began at `watching` is up to date, and knows nothing of what was before."""
        self._oldest = int(self._watched_since)
        self.era += 1
        if self._saved is not None:
            self._saved.begun_anew()

    def resumed(self) -> None:
        """The watch that a process before this one began has told all that happened since. Saved answers that this did
        not change are right; those that were read of them before are read again.
        """
        self._oldest = int(self._watched_since)
        self.era += 1
        for reference in [reference for reference, answer in self._answers.items() if answer.is_earlier]:
            del self._answers[reference]
        if self._saved is not None:
            self._saved.resumed()

    def _drop_ended(self) -> None:
        for reference, answer in list(self._answers.items()):
            if self._is_ended(reference, answer):
                self.drop(reference)

    def _is_ended(self, reference: str, answer: Answer) -> bool:
        """Whether what it names was deleted since it was given; the name may have come back as another adapter."""
        changes = self._changes.get(_adapter(reference))
        if changes is None or answer.revision >= changes.last.revision:
            return False
        versions = [version.number for version, _ in answer.resolution.targets]
        return answer.revision < changes.deleted_at or changes.last.ends(reference, versions)

    def _is_changed(self, reference: str, answer: Answer) -> bool:
        return answer.revision < self.required_revision(reference)

    def _right_at(self, answer: Answer) -> float:
        """When the answer was last known to be right."""
        return max(answer.asked_at, self._heard_at) if self._is_watched(answer) else answer.asked_at

    def _is_watched(self, answer: Answer) -> bool:
        is_heard_of = answer.revision >= self._watched_since and answer.asked_at > self._nothing_before
        return is_heard_of and not answer.is_earlier


def _adapter(reference: str) -> str:
    return reference.partition("@")[0]
