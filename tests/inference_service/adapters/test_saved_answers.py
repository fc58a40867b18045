"""What is kept of answers is what the next process needs: the last one, and when it was last known to be right."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_service.adapters.saved_answers import HEARD_SECONDS, SavedAnswers

REFERENCES = {"default/a": "default/a", "default/a@1": "default/a", "default/ab": "default/ab"}


class Saved:
    """Processes one after the other, and the clock on the wall."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 1000.0
        self.answers = self.opened()

    def opened(self) -> SavedAnswers:
        return SavedAnswers(self.path, lambda: self.now)

    def put(self, reference: str, response: bytes = b"1", *, is_watched: bool = True) -> None:
        self.answers.put(reference, REFERENCES[reference], response, is_watched=is_watched)

    def restart(self) -> None:
        self.answers.close()
        self.answers = self.opened()

    async def age(self, reference: str) -> float | None:
        found = await self.answers.find(reference)
        return found.age if found else None

    async def ages(self) -> list[float | None]:
        return [await self.age(reference) for reference in REFERENCES]


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    saved = Saved(tmp_path / "answers.sqlite")
    yield saved
    saved.answers.close()


async def test_the_last_answer_outlives_the_process(saved: Saved) -> None:
    saved.put("default/a", b"1")
    saved.now += 5
    saved.put("default/a", b"2")
    saved.restart()
    saved.now += 7
    found = await saved.answers.find("default/a")
    assert found == (b"2", 7.0)
    assert await saved.answers.find("default/b") is None


async def test_what_is_watched_is_right_as_long_as_the_watch_is_heard(saved: Saved) -> None:
    saved.put("default/a")
    saved.put("default/a@1", is_watched=False)
    for _ in range(4):
        saved.now += HEARD_SECONDS
        saved.answers.heard()
    assert await saved.ages() == [0.0, 4 * HEARD_SECONDS, None]
    saved.restart()
    saved.now += 100
    saved.answers.heard()  # this process's watch knows nothing of what was missed before it began
    assert await saved.ages() == [100.0, 100.0 + 4 * HEARD_SECONDS, None]


async def test_a_change_ends_that_for_its_adapter_only(saved: Saved) -> None:
    for reference in REFERENCES:
        saved.put(reference)
    saved.now += 1
    saved.answers.doubt("default/a")
    saved.now += 10
    saved.answers.heard()
    assert await saved.ages() == [10.0, 10.0, 0.0]
    saved.answers.doubt()
    saved.now += 10
    saved.answers.heard()
    assert await saved.ages() == [20.0, 20.0, 10.0]


async def test_what_means_nothing_is_gone(saved: Saved) -> None:
    for reference in REFERENCES:
        saved.put(reference)
    saved.answers.drop("default/a@1")
    assert await saved.ages() == [0.0, None, 0.0]
    saved.put("default/a@1")
    saved.answers.drop_adapter("default/a")
    assert await saved.ages() == [None, None, 0.0]


@pytest.mark.parametrize("content", [b"rubbish" * 1000, None])
async def test_a_file_that_cannot_be_used_disturbs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    path = tmp_path / "gone" / "answers.sqlite"
    if content is not None:
        path = tmp_path / "answers.sqlite"
        path.write_bytes(content)
    saved = Saved(path)
    saved.put("default/a")
    saved.answers.heard()
    assert await saved.age("default/a") is None
    saved.answers.close()
    assert "answers are not kept" in caplog.text
