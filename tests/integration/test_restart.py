"""A store that outlives the process, and faults under an engine: never another answer than a clean run's."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from chunkweave import Chunk, Engine, StoreConfig
from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.blobs import RedisBlobs
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.host import HostTier
from chunkweave.tiers.remote import RemoteTier
from tests.integration.redis_server import Server
from tests.toys import toy_model

CHUNKS = [
    Chunk(f"The {place} of Skerrow was founded in {year}. " * 3, place)
    for place, year in (("harbour", 1871), ("school", 1902), ("mill", 1855), ("chapel", 1790))
]
QUESTION = "When was the mill founded?"

ANSWER = """
import json, sys
from chunkweave import Chunk, Engine, StoreConfig
from tests.toys import toy_model
chunks = [Chunk(*pair) for pair in json.loads(sys.argv[2])]
with Engine(toy_model(), store=StoreConfig(cache_dir=__import__("pathlib").Path(sys.argv[1]))) as engine:
    answer = engine.generate(sys.argv[3], chunks, method=sys.argv[4], max_new_tokens=8)
    print(json.dumps({"tokens": answer.token_ids, "exact": answer.report.prefix_exact_tokens,
                      "reused": answer.report.reused_tokens + answer.report.recomputed_tokens,
                      "tiers": [chunk.tier for chunk in answer.report.chunks]}))
"""


def answer_in_another_process(folder: Path, chunks, method: str) -> dict:
    arguments = [str(folder), json.dumps([(chunk.text, chunk.source) for chunk in chunks]), QUESTION, method]
    done = subprocess.run([sys.executable, "-c", ANSWER, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_second_process_answers_from_the_first_ones_disk(tmp_path):
    first = answer_in_another_process(tmp_path / "kv", CHUNKS, "prefix")
    second = answer_in_another_process(tmp_path / "kv", CHUNKS, "prefix")
    assert second["tokens"] == first["tokens"]
    assert first["exact"] == 0
    assert second["exact"] > 0
    assert set(second["tiers"]) == {"disk"}
    other_order = answer_in_another_process(tmp_path / "kv", CHUNKS[::-1], "cacheblend")
    assert other_order["reused"] > 0


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
def test_what_comes_back_from_disk_is_what_the_codec_keeps(tmp_path, codec):
    config = StoreConfig(cache_dir=tmp_path / "kv", codec=codec)
    with Engine(toy_model(), store=config) as engine:
        clean = engine.generate(QUESTION, CHUNKS, max_new_tokens=8)
    with Engine(toy_model(), store=config) as engine:
        again = engine.generate(QUESTION, CHUNKS, max_new_tokens=8)
        engine.store.check()
    assert again.report.prefix_exact_tokens > 0
    if codec == "raw":
        assert again.token_ids == clean.token_ids


@pytest.fixture(scope="module")
def clean() -> tuple[int, ...]:
    return Engine(toy_model()).generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids


def warm(folder: Path) -> None:
    with Engine(toy_model(), store=StoreConfig(cache_dir=folder)) as engine:
        engine.generate(QUESTION, CHUNKS, max_new_tokens=1)


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def flip(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.3, 0.6, 0.9, 1.0])
def test_flipped_bits_cost_time_and_nothing_else(tmp_path, clean, share):
    warm(tmp_path)
    for path in segment_files(tmp_path)[::2]:
        flip(path, share)
    with Engine(toy_model(), store=StoreConfig(cache_dir=tmp_path)) as engine:
        assert engine.generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids == clean
        engine.store.flush(10)
        assert engine.generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids == clean


@pytest.mark.parametrize(
    "spoil", [lambda p: p.write_bytes(p.read_bytes()[:-7]), lambda p: p.unlink(), lambda p: p.write_bytes(b"")]
)
def test_cut_deleted_and_emptied_files_cost_time_and_nothing_else(tmp_path, clean, spoil):
    warm(tmp_path)
    engine = Engine(toy_model(), store=StoreConfig(cache_dir=tmp_path))
    for path in segment_files(tmp_path)[1::2]:
        spoil(path)
    with engine:
        assert engine.generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids == clean


def test_deleting_the_whole_directory_under_a_running_engine(tmp_path, clean):
    warm(tmp_path / "kv")
    with Engine(toy_model(), store=StoreConfig(cache_dir=tmp_path / "kv")) as engine:
        shutil.rmtree(tmp_path / "kv")
        assert engine.generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids == clean


def test_eviction_during_load(tmp_path, clean):
    warm(tmp_path)
    stop = threading.Event()
    with Engine(toy_model(), store=StoreConfig(cache_dir=tmp_path)) as engine:

        def evict():
            while not stop.is_set():
                for record in engine.store.records():
                    engine.store.remove(record.id)
                time.sleep(0.005)

        evictor = threading.Thread(target=evict)
        evictor.start()
        try:
            for _ in range(5):
                assert engine.generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids == clean
        finally:
            stop.set()
            evictor.join()
        engine.store.flush(10)
        engine.store.check()


def test_two_engines_on_one_directory(tmp_path, clean):
    config = StoreConfig(cache_dir=tmp_path)
    with Engine(toy_model(), store=config) as one, Engine(toy_model(), store=config) as two:
        assert one.generate(QUESTION, CHUNKS, max_new_tokens=8).token_ids == clean
        assert one.store.flush(10)
        answer = two.generate(QUESTION, CHUNKS, max_new_tokens=8)
        assert answer.token_ids == clean
        assert answer.report.prefix_exact_tokens > 0


def remote_engine(server: Server) -> Engine:
    """An engine whose memory forgets at once, so that every request goes to the server."""
    model = toy_model()
    tier = RemoteTier(RedisBlobs(server.url), model.fingerprint, deadline_s=0.5)
    store = TieredStore(
        [
            Level("host", SegmentStore(HostTier(), budget_bytes=0)),
            Level("remote", SegmentStore(tier, budget_bytes=1 << 40, shared=True, load=False), background=True),
        ]
    )
    return Engine(model, store=store)


def test_a_server_that_is_killed_paused_and_restarted_under_an_engine(server, clean):
    engine = remote_engine(server)

    def ask() -> int:
        answer = engine.generate(QUESTION, CHUNKS, max_new_tokens=8)
        assert answer.token_ids == clean
        engine.store.flush(10)
        return answer.report.prefix_exact_tokens

    assert ask() == 0
    assert ask() > 0
    server.pause()
    ask()
    server.resume()
    ask()
    server.kill()
    ask()
    server.start()
    ask()
    engine.store.close()


def test_a_time_to_live_counts_from_when_the_file_was_written(tmp_path):
    warm(tmp_path)
    with Engine(toy_model(), store=StoreConfig(cache_dir=tmp_path, ttl_s=3600)) as engine:
        assert engine.store.records()
        assert engine.store.expire(time.time() + 3601) > 0
    assert not segment_files(tmp_path)


def test_a_document_is_removed_with_all_its_chunks(tmp_path):
    parts = [Chunk(f"Part {i} tells of the quay.", f"quay.md#{i}") for i in range(3)]
    alone = ReuseConfig(capture=CaptureConfig(neutral_tokens=0))
    with Engine(toy_model(), store=StoreConfig(cache_dir=tmp_path), reuse=alone) as engine:
        engine.precompute([*parts, CHUNKS[0]])
        engine.store.flush(10)
        held = len(segment_files(tmp_path))
        assert engine.store.remove_where(lambda record: record.document == "quay.md") == 6
        assert [record.source for record in engine.store.records()] == ["harbour"]
    assert len(segment_files(tmp_path)) == held - 3, "and from the disk"


def test_our_own_files_beside_the_segments_raise_no_alarm(tmp_path, caplog):
    warm(tmp_path)
    (tmp_path / toy_model().fingerprint / "cost-model.json").write_text("{}")
    DiskTier(tmp_path, toy_model().fingerprint)
    assert not caplog.records
