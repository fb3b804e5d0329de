"""What replicas have to remove yet: kept until they confirm it, bounded, and beyond the end of the process."""

import asyncio
import json
from pathlib import Path

import pytest

from chunkweave.server.vllm_backend.removal_journal import EVERYTHING, JOURNAL_FILE, Removal, RemovalJournal

FEW = Removal("salt", ((1, 2), (3,)), (0,))
OTHER = Removal("", ((1, 2),))


def test_what_is_not_confirmed_is_found_by_the_next_journal(tmp_path: Path) -> None:
    async def work() -> None:
        journal = RemovalJournal(tmp_path / "data", ["a", "b"])
        assert await journal.add(["a", "b"], FEW) == {"a": FEW, "b": FEW}
        await journal.add(["b"], OTHER)
        await journal.done({"a": {FEW: 1}})
        assert (journal.pending("a"), journal.pending("b")) == ({}, {FEW: 1, OTHER: 1})
        again = RemovalJournal(tmp_path / "data", ["a", "b"])
        assert again.pending("b") == {FEW: 1, OTHER: 1}
        await again.done({"b": again.pending("b")})
        assert not (tmp_path / "data" / JOURNAL_FILE).exists()

    asyncio.run(work())


def test_what_is_asked_for_twice_is_pending_until_both_are_confirmed() -> None:
    async def work() -> None:
        journal = RemovalJournal(None, ["a"])
        await journal.add(["a"], FEW)
        asked = journal.pending("a")
        await journal.add(["a"], FEW)
        await journal.done({"a": asked})
        assert journal.pending("a") == {FEW: 1}
        await journal.done({"a": {FEW: 5}})
        assert journal.pending("a") == {}

    asyncio.run(work())


def test_what_is_too_much_becomes_everything_and_that_comes_first() -> None:
    async def work() -> None:
        journal = RemovalJournal(None, ["a"], most_tokens=4)
        assert await journal.add(["a"], FEW) == {"a": FEW}
        assert await journal.add(["a"], FEW) == {"a": FEW}, "it is there already"
        assert await journal.add(["a"], OTHER) == {"a": EVERYTHING}
        assert next(iter(journal.pending("a"))) == EVERYTHING
        assert await journal.add(["b"], Removal("x", ((1,) * 5,))) == {"b": EVERYTHING}

    asyncio.run(work())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', json.dumps({"format": 1, "pending": {"a": [{"salt": ""}]}})]
)
def test_a_file_that_cannot_be_read_means_everything(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL_FILE).write_text(text)
    journal = RemovalJournal(tmp_path, ["a", "b"])
    assert journal.pending("a") == journal.pending("b") == {EVERYTHING: 1}


def test_without_a_file_that_can_be_written_it_is_known_that_nothing_lasts(tmp_path: Path) -> None:
    async def work() -> None:
        assert not RemovalJournal(None, ["a"]).lasting
        journal = RemovalJournal(tmp_path / "other", ["a"])
        await journal.add(["a"], FEW)
        assert journal.lasting
        (tmp_path / "other" / JOURNAL_FILE).unlink()
        (tmp_path / "other").rmdir()
        (tmp_path / "other").write_text("no folder any more")
        await journal.add(["a"], OTHER)
        assert not journal.lasting
        assert journal.pending("a") == {FEW: 1, OTHER: 1}

    asyncio.run(work())
