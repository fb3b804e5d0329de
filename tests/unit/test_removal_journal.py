"""What replicas have to remove yet: kept until they confirm it, bounded, and beyond the end of the process."""

import asyncio
import json
from pathlib import Path

import pytest

from chunkweave_server.vllm_backend.removal import EVERYTHING, JOURNAL_FILE, Removal, RemovalJournal

FEW = Removal("salt", ((1, 2), (3,)), (0,))
OTHER = Removal("", ((1, 2),))


def said(journal: RemovalJournal, key: str) -> list[Removal]:
    return list(journal.pending(key).values())


def test_what_is_not_confirmed_is_found_by_the_next_journal(tmp_path: Path) -> None:
    async def work() -> None:
        journal = RemovalJournal(tmp_path / "data", ["a", "b"])
        noted = await journal.add(["a", "b"], FEW)
        await journal.add(["b"], OTHER)
        await journal.done({"a": {noted["a"]}})
        assert (said(journal, "a"), said(journal, "b")) == ([], [FEW, OTHER])
        again = RemovalJournal(tmp_path / "data", ["a", "b"])
        assert said(again, "b") == [FEW, OTHER]
        await again.done({"b": again.pending("b").keys()})
        assert not (tmp_path / "data" / JOURNAL_FILE).exists()

    asyncio.run(work())


@pytest.mark.parametrize("removal", [FEW, Removal("x", ((1,) * 5,))], ids=["equal", "everything"])
def test_what_one_removal_confirms_is_no_others_note(removal: Removal) -> None:
    async def work() -> None:
        journal = RemovalJournal(None, ["a"], most_tokens=4)
        first = await journal.add(["a"], removal)
        await journal.done({"a": journal.pending("a").keys()})  # by whoever caught up
        await journal.add(["a"], removal)
        await journal.done({"a": {first["a"]}})
        assert len(said(journal, "a")) == 1

    asyncio.run(work())


def test_what_is_too_much_becomes_everything_and_that_comes_first() -> None:
    async def work() -> None:
        journal = RemovalJournal(None, ["a"], most_tokens=4)
        await journal.add(["a"], FEW)
        await journal.add(["a"], FEW)
        assert said(journal, "a") == [FEW, FEW], "it is there already"
        await journal.add(["a"], OTHER)
        assert said(journal, "a") == [EVERYTHING, FEW, FEW]
        for number in range(5000):
            await journal.add(["b"], Removal(str(number)))
        assert len(said(journal, "b")) < 5000
        assert EVERYTHING in said(journal, "b")

    asyncio.run(work())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', json.dumps({"format": 1, "pending": {"a": [{"salt": ""}]}})]
)
def test_a_file_that_cannot_be_read_means_everything(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL_FILE).write_text(text)
    journal = RemovalJournal(tmp_path, ["a", "b"])
    assert said(journal, "a") == said(journal, "b") == [EVERYTHING]


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
        assert said(journal, "a") == [FEW, OTHER]

    asyncio.run(work())
