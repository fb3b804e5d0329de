"""`--cache-dir` and `chunkweave cache` on the small shape: restarts, sums, damage, removal."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.planning.cost import CostModel, cost_model_path, stored_cost_model
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.segment_file import read_header
from tests.integration.command_line import invoke, json_of, refusal, succeed, text_files

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def short_contexts() -> Iterator[None]:
    """What `ALONE` and `FEW` say."""
    init = Engine.__init__

    def with_few(self: Engine, *arguments: Any, reuse: ReuseConfig | None = None, **options: Any) -> None:
        reuse = reuse or ReuseConfig()
        passages = 0 if reuse.capture.contexts == "bundled" else reuse.capture.neutral_tokens
        few = replace(reuse.capture, neutral_tokens=passages, context_count=2, context_tokens=1)
        init(self, *arguments, reuse=replace(reuse, capture=few), **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "__init__", with_few)
        yield


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    texts = {f"d{i}.md": f"Document {i} tells of the lighthouse. " * 12 for i in range(2)}
    return text_files(tmp_path / "docs", texts)


@pytest.fixture(scope="module")
def made(tmp_path_factory, short_contexts) -> Path:
    """A cache directory with two documents, one of them in two chunks."""
    root = tmp_path_factory.mktemp("made")
    texts = {"short.md": "The harbour is deep.", "long.md": "The lighthouse is tall and old. " * 8}
    warm(root / "cache", text_files(root / "docs", texts))
    return root / "cache"


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    target = tmp_path / "cache"
    shutil.copytree(made, target)
    return target


WARM = ("cache", "warm", "--shape", "demo", "--chunk-tokens", 64)
ALONE = ("--contexts", "bundled")
"""Chunks alone: tests that look at segments one by one count on it."""
FEW = ("--contexts", "corpus")
"""Two contexts of one chunk each: a mean reads two of the other documents, and not all of them."""


def warm(cache: Path, docs: Path, *more: object, contexts: tuple = ALONE, code: int = 0) -> dict[str, Any]:
    return json_of(*WARM, cache, "--docs", docs, *contexts, *more, code=code)


def ask(cache: Path, docs: Path, *more: object):
    return json_of(
        "ask", "--set", "shape=demo", "--max-new-tokens", 3, "--docs", docs, "--cache-dir", cache, *more, "Why?"
    )


def segment_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/??/*.safetensors"))


def records_in(cache: Path) -> list[SegmentRecord]:
    return [read_header(path).record for path in segment_files(cache)]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_second_run_answers_from_the_first_ones_disk(documents, tmp_path):
    cache = tmp_path / "cache"
    (first,) = ask(cache, documents)["answers"]
    assert first["report"]["prefix_exact_tokens"] == 0
    assert len(segment_files(cache)) == 3  # system and two documents
    (second,) = ask(cache, documents)["answers"]
    assert second["answer"] == first["answer"]
    assert {chunk["tier"] for chunk in second["report"]["chunks"]} == {"disk"}
    tokens = sum(chunk["tokens"] for chunk in first["report"]["chunks"])
    assert second["report"]["prefix_exact_tokens"] == tokens


def test_an_error_after_computing_still_leaves_it_on_disk(documents, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    where = ("--docs", documents, "--cache-dir", tmp_path / "cache", "--set", "contexts=bundled")
    assert invoke("ask", "--set", "shape=demo", *where, "--precompute", "Why?").exit_code == 130
    assert len(segment_files(tmp_path / "cache")) == 2


def test_bench_takes_a_cache_dir_and_says_so(tmp_path):
    small = ("--questions", 1, "--chunks", 2, "--chunk-tokens", 16, "--methods", "prefix")
    options = ("--cache-dir", tmp_path / "cache", "--codec", "int8")
    result = json_of("bench", "ttft", "--shape", "demo", *small, *options)
    assert (result["config"]["tiers"], result["config"]["codec"]) == (["host", "disk"], "int8")
    assert result["config"]["dataset"] == "bundled documents"
    assert segment_files(tmp_path / "cache")


def test_the_remote_has_what_the_disk_has(documents, tmp_path):
    remote = tmp_path / "remote"
    ask(tmp_path / "cache", documents, "--set", f"remote_url=file://{remote}")
    names = {path.name for path in segment_files(tmp_path / "cache")}
    assert names == {path.name for path in segment_files(remote)}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("ttl=soon", "soon"),
        ("disk_budget=lots", "lots"),
        ("codec=zip", "zip"),
        ("remote_url=somewhere", "remote_url"),
    ],
)
def test_store_options_that_mean_nothing_are_usage_errors(tmp_path, setting, said):
    assert said in refusal("ask", "--set", "shape=demo", "--cache-dir", tmp_path / "cache", "--set", setting, "Why?")


def test_stats_add_up(cache):
    flip(segment_files(cache)[0], 100)
    (cache / "notes.txt").write_text("not ours", encoding="utf-8")
    stats = json_of("cache", "stats", cache)
    (model,) = stats["models"]
    assert stats["segments"] == model["segments"] == sum(row["segments"] for row in model["documents"]) == 2
    assert stats["bytes"] == sum(path.stat().st_size for path in segment_files(cache)[1:])
    assert [problem["problem"] for problem in stats["problems"]] == ["corrupt"]
    assert "By document" in invoke("cache", "stats", cache).stdout


def test_verify_finds_damage_and_repairs_only_that(cache):
    assert json_of("cache", "verify", cache)["sound"] == 3
    header, data, whole = segment_files(cache)
    flip(header, 100)
    flip(data, -1)
    foreign = whole.with_name("notes.txt")
    foreign.write_text("not ours", encoding="utf-8")
    found = json_of("cache", "verify", cache, code=1)
    assert (found["sound"], found["wrong"], found["repaired"]) == (1, 2, 0)
    assert {row["problem"] for row in found["problems"]} == {"corrupt", "foreign"}
    assert header.exists()
    assert data.exists()
    repaired = json_of("cache", "verify", cache, "--repair")
    assert (repaired["wrong"], repaired["repaired"]) == (0, 2)
    assert segment_files(cache) == [whole]
    assert foreign.exists()
    assert "sound: 1 segment;" in invoke("cache", "verify", cache).stdout


def test_verify_removes_nothing_that_the_system_would_not_read(cache, monkeypatch):
    def unread(*_arguments):
        raise OSError("no descriptors left")

    monkeypatch.setattr("chunkweave.tiers.segment_file._read_into", unread)
    found = json_of("cache", "verify", cache, "--repair", code=1)
    assert {row["problem"] for row in found["problems"]} == {"unreadable"}
    assert len(segment_files(cache)) == 3


def test_clear_removes_a_document_from_disk_and_remote(documents, tmp_path):
    cache, remote = tmp_path / "cache", tmp_path / "remote"
    url = f"file://{remote}"
    warm(cache, documents, "--remote-url", url)
    doomed = {record.id for record in records_in(cache) if record.document == "d0.md"}
    other = {path.stem for path in segment_files(cache)} - doomed
    next(path for path in segment_files(cache) if path.stem in doomed).unlink()  # only the remote has it now
    cleared = json_of("cache", "clear", cache, "--document", "d0.md", "--remote-url", url)
    assert cleared["remote_removed"] == len(doomed)
    assert {path.stem for path in segment_files(cache)} == {path.stem for path in segment_files(remote)} == other


def test_clear_says_when_the_remote_does_not_answer(cache, monkeypatch):
    def gone(*_arguments):
        raise OSError("connection refused")

    monkeypatch.setattr("chunkweave.tiers.blobs.FsspecBlobs.keys", gone)
    done = invoke("cache", "clear", cache, "--document", "short.md", "--remote-url", "memory://nowhere")
    assert done.exit_code == 1
    assert "run this command again" in done.stdout
    assert "short.md" not in {record.document for record in records_in(cache)}


def test_clear_asks_before_it_removes_everything(cache):
    assert invoke("cache", "clear", cache, "--all", stdin="n\n").exit_code == 1
    assert len(segment_files(cache)) == 3
    foreign = segment_files(cache)[0].with_name("notes.txt")
    foreign.write_text("not ours", encoding="utf-8")
    assert json_of("cache", "clear", cache, "--all", "--yes")["removed"] == 3
    assert segment_files(cache) == []
    assert foreign.exists()


def test_clear_by_chunk_and_fingerprint(cache):
    record, *_ = records_in(cache)
    assert json_of("cache", "clear", cache, "--chunk", record.chunk_id[:12])["removed"] == 1
    (fingerprint,) = {path.parents[1].name for path in segment_files(cache)}
    assert json_of("cache", "clear", cache, "--fingerprint", fingerprint[:6])["removed"] == 2


def test_clear_is_honest_about_files_that_cannot_be_read(cache):
    flip(segment_files(cache)[0], 100)
    cleared = json_of("cache", "clear", cache, "--document", "nowhere.md", code=1)
    assert (cleared["removed"], cleared["unknown"]) == (0, 1)


def test_clear_is_honest_about_the_remote_and_empties_it_of_a_whole_model(documents, tmp_path):
    cache, remote = tmp_path / "cache", tmp_path / "remote"
    where = ("--remote-url", f"file://{remote}")
    warm(cache, documents, *where)
    flip(segment_files(remote)[0], 100)
    cleared = json_of("cache", "clear", cache, "--document", "nowhere.md", *where, code=1)
    assert (cleared["removed"], cleared["remote_removed"], cleared["unknown"]) == (0, 0, 1)
    cleared = json_of("cache", "clear", cache, "--all", "--yes", *where)
    assert cleared["removed"] == cleared["remote_removed"] > 0
    assert segment_files(cache) == segment_files(remote) == []


def test_clear_says_what_it_could_not_remove(cache, monkeypatch):
    def refused(*_arguments, **_options):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    cleared = json_of("cache", "clear", cache, "--document", "short.md", code=1)
    assert (cleared["removed"], len(cleared["failed"])) == (0, 1)


def test_warm_goes_on_where_it_was(documents, tmp_path):
    cache = tmp_path / "cache"
    (documents / "d1.md").rename(tmp_path / "later.md")
    assert warm(cache, documents)["computed"] > 0
    (tmp_path / "later.md").rename(documents / "d1.md")
    second = warm(cache, documents)
    assert second["computed"] > 0
    assert second["present"] > 0
    third = warm(cache, documents)
    assert (third["computed"], third["missing"]) == (0, 0)
    assert third["bytes"] == sum(path.stat().st_size for path in segment_files(cache))


def test_warm_fails_if_the_budget_does_not_hold_the_documents(documents, tmp_path):
    assert warm(tmp_path / "cache", documents, "--disk-budget", "64KiB", code=1)["missing"] > 0


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Five documents of one chunk each: two about a lighthouse, two about a ferry, one about neither."""
    texts = {
        "lamp.md": "The lighthouse of Skerrow has a lamp of red glass, lit at dusk by its keeper.",
        "keeper.md": "The keeper of the lighthouse of Skerrow climbs to its lamp at dusk.",
        "ferry.md": "The ferry crosses the sound at noon and at six, with forty passengers.",
        "fares.md": "Passengers pay for the ferry across the sound at the pier, at noon or before.",
        "bees.md": "Ann keeps nine hives behind the old chapel.",
    }
    return text_files(tmp_path / "notes", texts)


def means_in(cache: Path) -> dict[str, SegmentRecord]:
    """The mean of each document."""
    return {record.document: record for record in records_in(cache) if record.contexts}


def test_warm_computes_means_and_says_how_many(notes, tmp_path):
    cache = tmp_path / "cache"
    done = succeed(*WARM, cache, "--docs", notes, *FEW)
    assert "computed 5 chunks" in done.stdout
    assert "means over several contexts: 5" in done.stdout
    again = warm(cache, notes, contexts=FEW)
    assert [again[key] for key in ("chunks", "computed", "present", "missing", "means")] == [5, 0, 5, 0, 5]
    assert again["bytes"] == sum(row.nbytes for row in means_in(cache).values())
    bundled = warm(tmp_path / "other", notes)
    assert (bundled["computed"], bundled["means"]) == (5, 0)


def test_warm_in_contexts_goes_on_where_it_was(notes, tmp_path, monkeypatch):
    """Interrupted in the middle it leaves means, and first passes, which it takes up; at the end these are gone."""
    cache, real, count = tmp_path / "cache", Engine.compute, 0

    def compute(self, *arguments, **options):
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "compute", compute)
        assert invoke(*WARM, cache, "--docs", notes, *FEW).exit_code == 130
    done = means_in(cache)
    assert 0 < len(done) < 5
    second = warm(cache, notes, contexts=FEW)
    assert (second["computed"], second["present"]) == (5 - len(done), len(done))
    assert means_in(cache).keys() == {path.name for path in notes.iterdir()}
    assert {name: row.id for name, row in means_in(cache).items() if name in done} == {
        name: row.id for name, row in done.items()
    }
    assert [one for one in records_in(cache) if one.document in done and not one.contexts] == []


@pytest.mark.parametrize("named_by", ["document", "chunk"])
@pytest.mark.parametrize("remote", [False, True], ids=["disk", "disk and remote"])
def test_clear_removes_all_that_has_read_a_document_and_nothing_else(notes, tmp_path, named_by, remote):
    cache, url = tmp_path / "cache", f"file://{tmp_path / 'remote'}"
    where = ("--remote-url", url) if remote else ()
    warm(cache, notes, *where, contexts=FEW)
    before, rows = {path.stem for path in segment_files(cache)}, means_in(cache)
    of_each = {name: readers_of(cache, row.chunk_id) for name, row in rows.items()}
    gone, readers = min(of_each.items(), key=lambda one: (not one[1], len(one[1])))
    row, others = rows[gone], rows.keys() - readers - {gone}
    assert readers
    assert others, "some documents were computed without it"
    name = {"document": gone, "chunk": row.chunk_id[:12]}[named_by]
    cleared = json_of("cache", "clear", cache, f"--{named_by}", name, *where)
    assert (cleared["readers"], cleared["removed"]) == (len(readers), 1 + len(readers))
    assert means_in(cache).keys() == others
    left = {path.stem for path in segment_files(cache)}
    assert len(before - left) == 1 + len(readers)
    if remote:
        assert {path.stem for path in segment_files(tmp_path / "remote")} == left
    (notes / gone).unlink()
    assert warm(cache, notes, contexts=FEW)["computed"] == len(readers)
    assert not readers_of(cache, row.chunk_id)


def readers_of(cache: Path, chunk: str) -> set[str]:
    """Documents of other chunks whose mean has read this one."""
    return {one.document for one in records_in(cache) if one.contexts and chunk in one.sources}


def test_clear_finds_readers_that_only_the_remote_has(notes, tmp_path):
    cache, remote = tmp_path / "cache", tmp_path / "remote"
    where = ("--remote-url", f"file://{remote}")
    warm(cache, notes, *where, contexts=FEW)
    chunk = means_in(cache)["lamp.md"].chunk_id
    doomed = {row.id for name, row in means_in(cache).items() if name in readers_of(cache, chunk) | {"lamp.md"}}
    for path in segment_files(cache):
        if path.stem in doomed:
            path.unlink()
    cleared = json_of("cache", "clear", cache, "--document", "lamp.md", *where)
    assert (cleared["remote_removed"], cleared["removed"]) == (len(doomed), 0)
    assert not doomed & {path.stem for path in segment_files(remote)}


def test_clear_finds_the_readers_of_a_chunk_that_is_evicted(notes, tmp_path):
    cache = tmp_path / "cache"
    warm(cache, notes, contexts=FEW)
    chunk = means_in(cache)["lamp.md"].chunk_id
    next(path for path in segment_files(cache) if path.stem == means_in(cache)["lamp.md"].id).unlink()
    readers = readers_of(cache, chunk)
    assert readers, "one segment is no text to forget"
    assert json_of("cache", "clear", cache, "--chunk", chunk)["readers"] == len(readers)


@pytest.mark.parametrize("command", ["stats", "verify", "clear"])
def test_what_is_no_cache_directory_is_refused_untouched(command, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("not ours", encoding="utf-8")
    more = {"clear": ["--all", "--yes"]}.get(command, [])
    for path, said in ((tmp_path, "no cache directory"), (tmp_path / "nowhere", "no such folder")):
        assert said in refusal("cache", command, path, *more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "photos"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("clear",),
        ("clear", "--all", "--document", "a"),
        ("stats", "--fingerprint", "zz"),
    ],
)
def test_a_command_that_does_not_say_enough_is_a_usage_error(made, arguments):
    command, *more = arguments
    assert invoke("cache", command, made, *more).exit_code == 2
    assert len(segment_files(made)) == 3


def test_an_empty_folder_is_an_empty_cache(tmp_path):
    assert json_of("cache", "stats", tmp_path)["segments"] == 0
    assert json_of("cache", "verify", tmp_path)["wrong"] == 0


def test_a_stored_cost_model_is_of_this_model_or_none(tmp_path, caplog):
    assert stored_cost_model(None, "f") is stored_cost_model(tmp_path, "f") is None
    path = cost_model_path(tmp_path, "f")
    path.parent.mkdir()
    cost = CostModel((0,), (8,), ((0.1,),), 64, {"disk": 1e6}, "f")
    cost.save(path)
    assert stored_cost_model(tmp_path, "f") == cost
    CostModel((0,), (8,), ((0.1,),), 64, {}, "other").save(path)
    assert stored_cost_model(tmp_path, "f") is None
    assert "another model" in caplog.text
    path.write_text("{", encoding="utf-8")
    assert stored_cost_model(tmp_path, "f") is None
