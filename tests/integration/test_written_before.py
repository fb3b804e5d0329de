"""What the version before wrote is read, and two versions beside each other do no harm to what the other one wrote.

What a later version wrote in a format of its own is left as it is.

The committed data stands for the version before: what this version writes has the same names, formats and fields.
"""

import json
import shutil
from pathlib import Path

import pytest

from chunkweave import Chunk, Corpus, CorpusDocument, Engine, StoreConfig
from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared_folder import PinFile, Tombstones
from chunkweave.tiers import segment_header
from chunkweave.tiers.blobs import RedisBlobs
from chunkweave.tiers.remote import RemoteTier
from chunkweave.types import ChunkId, SegmentId
from tests.integration.redis_server import Server

WRITTEN = Path(__file__).parents[1] / "data" / "written-before"
CHUNKS = [Chunk("The Ger Tower has 200 steps.", source="ger"), Chunk("The Sel Tower has 201 steps.", source="sel")]
GONE = Chunk("Gone.", source="gone")
OTHER = Chunk("The Mor Tower has 202 steps.", source="mor")
QUESTION = "How many steps has the Sel Tower?"
[FINGERPRINT] = (path.name for path in (WRITTEN / "remote").iterdir())
SEGMENTS = sorted((WRITTEN / "remote").glob("*/*/*.safetensors"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN / "cache", tmp_path / "cache"))


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN / "remote", tmp_path / "remote"))


def reader(**store: object) -> Engine:
    return Engine.load("reader", device="cpu", dtype="float32", store=StoreConfig(**store))


def ask(engine: Engine, chunks: list[Chunk], method: str | None = "prefix", **options: object):
    return engine.generate(QUESTION, chunks, system="Answer.", max_new_tokens=4, method=method, **options)


def sources(answer) -> list[str | None]:
    return [chunk.tier for chunk in answer.report.chunks]


def header(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_written_alike(new: Path, old: Path) -> None:
    """The files are those of the version before: same header, but for times and checksums, and same size."""
    ours, theirs = header(new), header(old)
    ours_said, theirs_said = ours.pop("__metadata__"), theirs.pop("__metadata__")
    assert list(ours_said) == list(theirs_said)
    varying = {"checksum", "created", "layer_checksums"}
    assert {name for name in ours_said if ours_said[name] != theirs_said[name]} <= varying
    assert ours == theirs
    assert new.stat().st_size == old.stat().st_size


# ---------------------------------------------------------------- the cache folder


def test_segments_are_found_and_give_the_same_answer(cache: Path) -> None:
    with reader(cache_dir=cache) as engine, reader() as fresh:
        answer = ask(engine, CHUNKS)
        assert [chunk.kv_source for chunk in answer.report.chunks] == ["prefix-exact"] * 3
        assert set(sources(answer)) == {"disk"}
        assert answer.token_ids == ask(fresh, CHUNKS, "full").token_ids
        woven = ask(engine, CHUNKS[::-1], "full-reuse")
        assert [chunk.kv_source for chunk in woven.report.chunks[1:]] == ["reused", "reused"]
        engine.store.check()


def test_a_pinned_segment_stays_where_there_is_no_room(cache: Path) -> None:
    [pinned] = PinFile(cache).read()[FINGERPRINT]
    with reader(cache_dir=cache, disk_budget_bytes=1):
        assert [path.stem for path in cache.glob("*/*/*.safetensors")] == [pinned]


def test_a_segment_that_was_removed_is_not_used(cache: Path) -> None:
    removed = json.loads((cache / "removed.json").read_text())["removed"][FINGERPRINT]["disk"]
    assert list(cache.glob(f"*/*/{next(iter(removed))}.safetensors"))
    with reader(cache_dir=cache) as engine:
        assert sources(ask(engine, [GONE]))[1:] == [None]


def test_new_segments_pins_and_removals_are_written_as_before(cache: Path, tmp_path: Path) -> None:
    before = contents(cache)
    with reader(cache_dir=tmp_path / "new") as engine:
        ask(engine, CHUNKS)
        ask(engine, [GONE])
    segments = {name for name in before if name.endswith(".safetensors")}
    assert segments == {name for name in contents(tmp_path / "new") if name.endswith(".safetensors")}
    for name in segments:
        assert_written_alike(tmp_path / "new" / name, cache / name)
    for file, change in (
        ("pins.json", lambda: PinFile(cache).add("another-model", [SegmentId("0" * 32)])),
        ("removed.json", lambda: Tombstones(cache, "another-model", "disk").add([record_of_one_token()])),
    ):
        old = json.loads(before[file])
        change()
        new = json.loads((cache / file).read_text())
        [name] = set(new) - {"format"}
        added = new[name].pop("another-model")
        assert new == old
        assert type(added) is type(old[name][FINGERPRINT])


def test_segments_of_a_later_format_are_computed_again_and_left(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(segment_header.SegmentLayout, "version", segment_header.FORMAT_VERSION + 1)
        with reader(cache_dir=tmp_path) as engine:
            ask(engine, CHUNKS)
    written = contents(tmp_path)
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) == 3
    with reader(cache_dir=tmp_path) as engine, reader() as fresh:
        answer = ask(engine, CHUNKS)
        assert sources(answer) == [None] * 3
        assert answer.token_ids == ask(fresh, CHUNKS).token_ids
    assert contents(tmp_path) == written


@pytest.mark.parametrize(("file", "said"), [("pins.json", "nothing is pinned"), ("removed.json", "may be used")])
def test_a_list_of_a_later_format_is_named_and_left(cache: Path, caplog, file: str, said: str) -> None:
    path = cache / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    later = path.read_bytes()
    with reader(cache_dir=cache) as engine:
        assert set(sources(ask(engine, CHUNKS))) == {"disk"}
    assert said in caplog.text
    assert str(path) in caplog.text
    assert path.read_bytes() == later


def record_of_one_token() -> SegmentRecord:
    return SegmentRecord.of(ChunkId("1" * 32), (), (1,), exact=True, nbytes=1)


# ---------------------------------------------------------------- the calibration record


def test_the_calibration_record_is_used(cache: Path) -> None:
    with reader(cache_dir=cache) as engine:
        assert engine.calibration is not None
        assert engine.calibration.questions == 2
        method, reuse = engine.calibration.config("balanced") or pytest.fail("no method reaches it")
        assert (method, reuse.recompute_ratio) == ("query", 0.1)
        assert ask(engine, CHUNKS, None, quality="balanced").report.method == "query"


@pytest.mark.parametrize("version", [1, 3])
def test_a_calibration_record_of_another_format_is_named_and_passed_over(cache: Path, caplog, version: int) -> None:
    path = cache / FINGERPRINT / "chunkweave-calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with reader(cache_dir=cache) as engine:
        assert engine.calibration is None or engine.calibration.questions != 2
    assert f"{path} is a calibration record of format {version}" in caplog.text


# ---------------------------------------------------------------- the remote


def test_two_versions_share_a_remote(remote: Path) -> None:
    before = contents(remote)
    with reader(remote_url=f"file://{remote}", codec="int8") as engine:
        answer = ask(engine, CHUNKS)
        assert [chunk.kv_source for chunk in answer.report.chunks] == ["prefix-exact"] * 3
        assert [tier.partition(":")[0] for tier in sources(answer)] == ["remote"] * 3
        ask(engine, [*CHUNKS, OTHER])
        engine.store.flush()
    after = contents(remote)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1


def test_what_is_written_to_a_remote_is_what_the_version_before_reads(tmp_path: Path) -> None:
    with reader(remote_url=f"file://{tmp_path}/new", codec="int8") as engine:
        ask(engine, CHUNKS)
    assert contents(tmp_path / "new").keys() == contents(WRITTEN / "remote").keys()
    for path in SEGMENTS:
        assert_written_alike(tmp_path / "new" / path.relative_to(WRITTEN / "remote"), path)


def test_a_server_s_keys_and_values_are_those_of_the_version_before(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        blobs = RedisBlobs(server.url)
        stored = {f"chunkweave:{FINGERPRINT}:{path.stem}".encode(): path.read_bytes() for path in SEGMENTS}
        for name, value in stored.items():
            blobs._client.set(name, value)
        tier = RemoteTier(blobs, FINGERPRINT)
        assert {record.id for record in tier.records()} == {path.stem for path in SEGMENTS}
        found = tier.get(SegmentId(SEGMENTS[0].stem))
        assert found is not None
        found.layer(0)
        tier.put(found.header.record, found)
        assert set(blobs._client.keys()) == stored.keys()
        assert all(blobs._client.get(name) == value for name, value in list(stored.items())[1:])
        assert len(blobs._client.get(next(iter(stored)))) == tier.size_of(found.header.record, found)
        blobs.close()
    finally:
        server.kill()


# ---------------------------------------------------------------- the corpus


def test_the_corpus_is_searched(tmp_path: Path) -> None:
    corpus = Corpus.open(Path(shutil.copytree(WRITTEN / "corpus", tmp_path / "corpus")))
    [found] = corpus.search("Sel Tower steps", 1)
    assert "201 steps" in found.chunk.text


def test_a_corpus_is_written_as_before(tmp_path: Path) -> None:
    old = Corpus.open(WRITTEN / "corpus")
    new = Corpus.create(tmp_path / "new", old.embedder, split=old.split, index=old.index_config)
    new.add([CorpusDocument("towers.md", old.documents[0].chunks[0])])
    written, before = contents(tmp_path / "new"), contents(WRITTEN / "corpus")
    assert written.keys() == before.keys()
    names = {name for name in before if not name.endswith(".safetensors")}
    rows, rows_before = ([json.loads(data[name]) for name in sorted(names)] for data in (written, before))
    for row, row_before in zip(rows, rows_before, strict=True):
        assert shape(row) == shape(row_before)
    assert {name: data for name, data in written.items() if name not in names} == {
        name: data for name, data in before.items() if name not in names
    }


def shape(data: object) -> object:
    """Names and types, for digests depend on how the text ended."""
    if isinstance(data, dict):
        return {name: shape(value) for name, value in data.items()}
    return [shape(one) for one in data] if isinstance(data, list) else type(data)
