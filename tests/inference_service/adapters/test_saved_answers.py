"""What is kept of answers is what the next process needs: the last one, and when it was last known to be right."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from inference_service.adapters.saved_answers import HEARD_SECONDS, SavedAnswers

REFERENCES = {"default/a": "default/a", "default/a@1": "default/a", "default/ab": "default/ab"}


def _nothing_ends(reference: str, response: bytes) -> bool:
    return False


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
    saved.answers.changed("default/a", _nothing_ends)
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
    saved.put("default/a@1", b"old")
    saved.answers.changed("default/a", lambda reference, response: (reference, response) == ("default/a@1", b"old"))
    assert await saved.ages() == [0.0, None, 0.0]
    saved.answers.changed("default/a", lambda *_: True)
    assert await saved.ages() == [None, None, 0.0]


async def test_where_the_watch_is_resumed_what_it_left_is_right_but_for_what_changed(saved: Saved) -> None:
    saved.put("default/a")
    saved.put("default/ab")
    saved.put("default/a@1", is_watched=False)
    assert await saved.answers.token() == ""
    saved.answers.heard("five")
    saved.now += 1
    saved.answers.heard("six")  # too soon to be written: what is told twice does no harm
    saved.restart()
    assert await saved.answers.token() == "five"
    saved.now += 100
    saved.answers.changed("default/ab", _nothing_ends)
    saved.answers.resumed()
    saved.now += HEARD_SECONDS
    saved.answers.heard("seven")
    assert await saved.ages() == [0.0, 101.0 + HEARD_SECONDS, 101.0 + HEARD_SECONDS]
    saved.answers.doubt()
    assert await saved.answers.token() == ""
    saved.restart()
    saved.now += 1
    assert await saved.ages() == [1.0, 102.0 + HEARD_SECONDS, 102.0 + HEARD_SECONDS]


async def test_a_file_of_before_there_were_tokens(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database:
        columns = "reference text primary key, adapter text, right_at real, is_watched integer, response blob"
        database.executescript(f"create table answers ({columns}); create table heard (at real);")
        database.execute("insert into answers values ('default/a', 'default/a', 900, 1, x'31')")
        database.execute("insert into heard values (990)")
        database.commit()
    saved = Saved(tmp_path / "answers.sqlite")
    assert await saved.ages() == [10.0, None, None]
    assert await saved.answers.token() == ""
    saved.answers.close()


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
