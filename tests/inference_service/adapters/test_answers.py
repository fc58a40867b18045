"""What is believed: with a watch, never what the watch has contradicted; without one, nothing beyond its ttl."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapters import answers as answers_module
from inference_service.adapters.adapter_change import AdapterChange
from inference_service.adapters.answers import Answer, Answers
from inference_service.adapters.resolution import Resolution, ResolvedVersion

TTL, MAX_STALE = 10.0, 100.0
NAMES = ["default/a", "default/b", "default/c"]


def _resolution(number: int) -> Resolution:
    version = ResolvedVersion(f"v{number}", number, "u", "sha256:", (), (), rank=1)
    return Resolution("u", "latest", ((version, 1.0),), TTL)


def _number(answer: Answer) -> int:
    return answer.resolution.choose("").number


@dataclass
class World:
    """A registry whose changes are numbered, a watch that is somewhere in them, and replicas that lag."""

    now: float = 1000.0
    revision: int = 1
    changes: dict[int, str] = field(default_factory=dict)
    told: int | None = None  # how far the watch has told; None: it is down
    heard_at: float = -1e9

    def clock(self) -> float:
        return self.now

    def meaning(self, name: str, revision: int) -> int:
        """The version that a name meant at a revision: the revision of its last change."""
        return max((r for r, changed in self.changes.items() if changed == name and r <= revision), default=0)


STEP = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(NAMES)),
    st.tuples(st.just("ask"), st.sampled_from(NAMES), st.integers(0, 3), st.floats(0, 3)),
    st.tuples(st.just("wait"), st.floats(0.5, 12)),
    st.tuples(st.sampled_from(["hear", "hear", "break", "begin", "forget"])),
)


@given(st.lists(STEP, max_size=60))
def test_nothing_that_the_watch_contradicts_is_believed(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    answers = Answers(MAX_STALE, world.clock)
    resumable: int | None = None
    for step in steps:
        match step:
            case ("change", name):
                world.revision += 1
                world.changes[world.revision] = name
            case ("ask", name, lag, seconds):
                asked_at = world.now
                seen = max(
                    world.revision - lag, answers.required_revision(name)
                )  # a replica that lags, but min_revision
                world.now += seconds
                answers.put(name, Answer(_resolution(world.meaning(name, seen)), asked_at, seen))
            case ("wait", seconds):
                world.now += seconds
            case ("hear",) if world.told is not None:
                for revision in range(world.told + 1, world.revision + 1):
                    answers.changed(AdapterChange(world.changes[revision], revision))
                world.told = resumable = world.revision
                world.heard_at = world.now
                answers.confirmed(world.revision)
            case ("break",):
                world.told = None
            case ("begin",):
                if resumable is None:
                    answers.watching(world.revision)
                    world.told = resumable = world.revision
                else:
                    world.told = resumable
            case ("forget",):
                answers.start_over()
                world.told = resumable = None
        for name in NAMES:
            found = answers.find(name)
            if found is None or not answers.is_believed(name, found):
                continue
            is_new = world.now < found.asked_at + TTL
            is_confirmed = resumable is not None and _number(found) == world.meaning(
                name, max(resumable, found.revision)
            )
            assert is_new or (is_confirmed and world.now < world.heard_at + TTL)
            if resumable is not None:
                assert found.revision >= answers.required_revision(name)


def _clock_at(times: list[float]) -> Answers:
    return Answers(MAX_STALE, lambda: times[-1])


def test_staleness_counts_from_the_last_time_that_the_watch_was_heard() -> None:
    times = [0.0]
    answers = _clock_at(times)
    answers.watching(5)
    answers.put("default/a", Answer(_resolution(1), 0.0, 5))
    times.append(500.0)
    answers.confirmed(5)
    answer = answers.find("default/a")
    assert answer is not None
    assert answers.is_believed("default/a", answer)
    times.append(500.0 + TTL)
    assert not answers.is_believed("default/a", answer)
    assert answers.may_serve(answer)
    times.append(500.1 + MAX_STALE)
    assert not answers.may_serve(answer)


def test_an_answer_from_before_the_watch_is_not_confirmed_by_it() -> None:
    times = [0.0]
    answers = _clock_at(times)
    answers.put("default/a", Answer(_resolution(1), 0.0, 4))
    answers.watching(5)
    times.append(TTL)
    answers.confirmed(5)
    answer = answers.find("default/a")
    assert answer is not None
    assert not answers.is_believed("default/a", answer)


def test_what_was_deleted_is_not_found_until_it_is_asked_for_again() -> None:
    answers = _clock_at([0.0])
    answers.watching(1)
    for reference in ("default/a", "default/a@1", "default/ab"):
        answers.put(reference, Answer(_resolution(1), 0.0, 1))
    answers.changed(AdapterChange("default/a", 2, is_deleted=True))
    assert [answers.find(r) is None for r in ("default/a", "default/a@1", "default/ab")] == [True, True, False]
    answers.put("default/a", Answer(_resolution(1), 0.0, 3))
    assert answers.find("default/a") is not None


def test_what_names_a_deleted_version_or_alias_is_not_found() -> None:
    answers = _clock_at([0.0])
    answers.watching(1)
    meanings = {"default/a": 2, "default/a@1": 1, "default/a@2": 2, "default/a@latest": 2, "default/a@prod": 1}
    for reference, number in meanings.items():
        answers.put(reference, Answer(_resolution(number), 0.0, 1))
    split = Resolution("u", "canary", tuple((_resolution(n).targets[0][0], 1.0) for n in (1, 2)), TTL)
    answers.put("default/a@canary", Answer(split, 0.0, 1))

    def found() -> set[str]:
        return {r for r in (*meanings, "default/a@canary") if answers.find(r) is not None}

    answers.changed(AdapterChange("default/a", 2, aliases=frozenset(["prod", "canary"])))
    assert found() == {*meanings, "default/a@canary"}
    answers.changed(AdapterChange("default/a", 3, deleted_versions=frozenset([2]), aliases=frozenset(["prod"])))
    assert found() == {"default/a@1", "default/a@prod"}
    answers.put("default/a@2", Answer(_resolution(2), 0.0, 2))  # asked for before, and it comes late
    answers.changed(AdapterChange("default/a", 4, aliases=frozenset()))
    assert found() == {"default/a@1"}
    answers.put("default/a", Answer(_resolution(1), 0.0, 4))
    assert found() == {"default/a", "default/a@1"}


def test_forgetting_changes_forgets_no_contradiction() -> None:
    times = [0.0]
    answers = _clock_at(times)
    answers.watching(1)
    answers.put("default/a", Answer(_resolution(1), 0.0, 1))
    answers.changed(AdapterChange("default/a", 2))
    for revision in range(3, answers_module.MAX_CHANGES + 3):
        answers.changed(AdapterChange(f"default/other-{revision}", revision))
    assert answers.required_revision("default/a") == 0
    answer = answers.find("default/a")
    assert answer is not None
    assert not answers.is_believed("default/a", answer)
