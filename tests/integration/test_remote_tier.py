"""Segments in a real server on loopback, in memory:// and in file://: what is put comes back, and nothing else does."""

import hashlib
import logging
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chunkweave.errors import UsageError, install_extra
from chunkweave.kv.segment import SegmentKV, SegmentLost, SegmentSource, make_codec
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.blobs import BlobKey, BlobRefused, BlobStore, FsspecBlobs, RedisBlobs, open_blobs, without_secrets
from chunkweave.tiers.remote import RemoteTier
from chunkweave.tiers.segment_file import write_segment
from chunkweave.tiers.segment_header import FORMAT_VERSION, header_size
from chunkweave.types import ChunkId, SegmentId
from tests.integration.redis_server import PASSWORD, Server, make_certificate
from tests.toys import run_at_once

FINGERPRINT = "fp-a1"


def make_segment(seed: int, *, layers: int = 3, tokens: int = 5) -> tuple[SegmentRecord, SegmentKV]:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn((layers, 2, tokens, 2, 8), generator=generator).to(torch.bfloat16)
    ids = tuple(range(seed, seed + tokens))
    record = SegmentRecord.of(ChunkId(f"{seed:032x}"), (), ids, exact=True, nbytes=kv.nbytes, source=f"doc {seed}")
    return record, SegmentKV(kv)


def assert_same(found: SegmentSource | None, expected: SegmentKV) -> None:
    assert found is not None
    assert (found.tokens, found.nbytes) == (expected.tokens, expected.nbytes)
    for layer in range(expected.kv.shape[0]):
        assert torch.equal(found.layer(layer), expected.layer(layer))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["redis", "memory", "file"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    if request.param == "redis":
        running: Server = request.getfixturevalue("server")
        store: BlobStore = RedisBlobs(running.url)
        RedisBlobs(running.url)._client.flushall()
    elif request.param == "memory":
        store = open_blobs(f"memory://{tmp_path.name}/cache")
    else:
        store = open_blobs(f"file://{tmp_path}/cache")
    yield store
    store.close()


# ---------------------------------------------------------------- every kind of store


def test_put_get_replace_delete(blobs: BlobStore) -> None:
    tier, another = RemoteTier(blobs, FINGERPRINT), RemoteTier(blobs, FINGERPRINT)
    record, payload = make_segment(1)
    assert tier.get(record.id) is None
    assert tier.nbytes(record.id) == 0
    tier.put(record, payload)
    assert_same(tier.get(record.id), payload)
    assert tier.nbytes(record.id) == tier.size_of(record, payload) > payload.nbytes
    other = SegmentKV(payload.kv + 1)
    tier.put(record, other)
    assert_same(tier.get(record.id), other)
    assert_same(another.get(record.id), other)
    another.delete(record.id)
    another.delete(record.id)
    assert tier.get(record.id) is None
    assert tier.nbytes(record.id) == 0
    assert (tier.stats.hits, tier.stats.misses, tier.stats.puts) == (2, 2, 2)
    assert tier.stats.garbage == tier.stats.unavailable == 0


def test_records_come_back_whole_and_only_of_this_fingerprint(blobs: BlobStore) -> None:
    tier, other = RemoteTier(blobs, FINGERPRINT), RemoteTier(blobs, "fp-a")
    assert list(tier.records()) == []
    segments = [make_segment(seed) for seed in range(1, 8)]
    for record, payload in segments:
        tier.put(record, payload)
    other.put(*make_segment(99))
    listed = {record.id: record for record in tier.records()}
    assert listed.keys() == {record.id for record, _ in segments}
    for record, payload in segments:
        found = listed[record.id]
        assert (found.token_ids, found.context, found.source) == (record.token_ids, record.context, record.source)
        assert found.nbytes == tier.nbytes(record.id) == tier.size_of(record, payload)
    assert [record.id for record in other.records()] == [make_segment(99)[0].id]
    assert other.get(segments[0][0].id) is None


def test_a_long_header_is_listed_too(blobs: BlobStore) -> None:
    tier = RemoteTier(blobs, FINGERPRINT)
    record, payload = make_segment(100_000, tokens=14_000)  # more token ids than the first read brings
    tier.put(record, payload)
    assert [found.token_ids for found in tier.records()] == [record.token_ids]


def test_the_header_of_a_usual_chunk_takes_one_read(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RemoteTier(blobs, FINGERPRINT)
    record, payload = make_segment(7, tokens=4000)
    tier.put(record, payload)
    reads, get = [], blobs.get
    monkeypatch.setattr(blobs, "get", lambda *asked: (reads.append(asked), get(*asked))[1])
    (found,) = tier.find([record.id])
    assert found.token_ids == record.token_ids
    assert len(reads) == 1


def test_a_list_that_ends_at_its_bound_is_an_error(blobs: BlobStore) -> None:
    """Else a removal would count as complete, and the rest would be used again."""
    tier, listed = RemoteTier(blobs, FINGERPRINT, max_listed=3), []
    for seed in range(3):
        tier.put(*make_segment(seed))
    assert len(list(tier.records())) == 3
    tier.put(*make_segment(3))
    with pytest.raises(OSError, match="more than 3 are not listed"):
        listed.extend(tier.records())
    store = SegmentStore(tier, budget_bytes=1 << 40, shared=True, load=False)
    assert not store.withdraw(lambda _: True).complete
    assert tier.clear() == 1


def test_concurrent_clients(blobs: BlobStore) -> None:
    segments = [make_segment(seed) for seed in range(6)]

    def work(offset: int) -> None:
        tier = RemoteTier(blobs, FINGERPRINT)
        for i in range(30):
            record, payload = segments[(i + offset) % len(segments)]
            tier.put(record, payload)
            held = tier.get(record.id)
            if held is not None:
                assert_same(held, payload)
            if i % 7 == offset:
                tier.delete(record.id)
        assert tier.stats.garbage == tier.stats.unavailable == 0

    run_at_once(4, work)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_codecs_are_read_by_what_the_bytes_say(blobs: BlobStore, codec: str) -> None:
    record, payload = make_segment(5, tokens=64)
    writer = RemoteTier(blobs, FINGERPRINT, codec=make_codec(codec))
    writer.put(record, payload)
    found = RemoteTier(blobs, FINGERPRINT).get(record.id)
    assert found is not None
    assert writer.nbytes(record.id) < payload.nbytes
    assert (found.layer(1).float() - payload.layer(1).float()).abs().max() < 0.3


def stored(blobs: BlobStore) -> tuple[RemoteTier, BlobKey, bytes]:
    """A tier with a segment, the segment's key, and the bytes that are stored under it."""
    record, payload = make_segment(6)
    tier = RemoteTier(blobs, FINGERPRINT)
    tier.put(record, payload)
    key = BlobKey(FINGERPRINT, record.id)
    return tier, key, blobs.get(key) or b""


@pytest.mark.parametrize("position", [3, 40, 700, -1])
def test_a_flipped_byte_is_a_miss_or_a_lost_layer(blobs: BlobStore, position: int) -> None:
    tier, key, whole = stored(blobs)
    data = bytearray(whole)
    data[position] ^= 0x10
    blobs.put(key, bytes(data))
    damaged = tier.get(key.segment)
    if damaged is not None:
        with pytest.raises(SegmentLost):
            [damaged.layer(layer) for layer in range(3)]
    assert tier.stats.garbage == 1


@pytest.mark.parametrize("keep", [1, 7, 100, 1000, -1])
def test_bytes_cut_short_or_extended_are_a_miss(blobs: BlobStore, keep: int) -> None:
    tier, key, data = stored(blobs)
    blobs.put(key, data[:keep])
    assert tier.get(key.segment) is None
    blobs.put(key, data + b"\0")
    assert tier.get(key.segment) is None
    assert tier.stats.garbage == 2
    assert list(tier.records()) == []


def test_another_segments_or_models_bytes_are_a_miss(blobs: BlobStore) -> None:
    (record, payload), (other, _) = make_segment(8), make_segment(9)
    tier, stranger = RemoteTier(blobs, FINGERPRINT), RemoteTier(blobs, "fp-b")
    tier.put(record, payload)
    stranger.put(record, payload)
    blobs.put(BlobKey(FINGERPRINT, other.id), blobs.get(BlobKey(FINGERPRINT, record.id)) or b"")
    assert tier.get(other.id) is None
    blobs.put(BlobKey(FINGERPRINT, other.id), blobs.get(BlobKey("fp-b", record.id)) or b"")
    assert tier.get(other.id) is None
    assert tier.stats.garbage == 2


def test_another_format_is_refused_and_stays(blobs: BlobStore) -> None:
    tier, key, data = stored(blobs)
    newer = _with_version(data, FORMAT_VERSION + 1)
    blobs.put(key, newer)
    for _ in range(5):
        assert tier.get(key.segment) is None
    assert list(tier.records()) == []
    assert (tier.stats.refused, tier.stats.garbage) == (6, 0)
    assert not tier.breaker.is_open
    assert blobs.get(key) == newer


def test_sizes_are_bounded_both_ways(blobs: BlobStore) -> None:
    record, payload = make_segment(11)
    small, large = RemoteTier(blobs, FINGERPRINT, max_bytes=1000), RemoteTier(blobs, FINGERPRINT)
    with pytest.raises(BlobRefused, match="limit is 1000"):
        small.put(record, payload)
    assert not small.breaker.is_open
    large.put(record, payload)
    assert small.get(record.id) is None
    assert (small.stats.failed_puts, small.stats.garbage) == (1, 1)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "*", "A" * 32, "0" * 31, "0" * 32 + "\n"])
def test_foreign_ids_never_become_names(blobs: BlobStore, name: str) -> None:
    tier = RemoteTier(blobs, FINGERPRINT)
    assert tier.get(SegmentId(name)) is None
    assert tier.nbytes(SegmentId(name)) == 0
    tier.delete(SegmentId(name))
    with pytest.raises(ValueError, match="segment id"):
        BlobKey(FINGERPRINT, SegmentId(name))


@pytest.mark.parametrize("fingerprint", ["", "..", "a/b", "a:b", "*", ".hidden", "a..b"])
def test_fingerprints_that_could_lead_elsewhere_are_refused(blobs: BlobStore, fingerprint: str) -> None:
    with pytest.raises(UsageError):
        RemoteTier(blobs, fingerprint)


# ---------------------------------------------------------------- the bytes


def test_a_folder_of_the_disk_tier_can_be_read_as_a_remote(tmp_path: Path) -> None:
    record, payload = make_segment(13)
    folder = tmp_path / FINGERPRINT / record.id[:2]
    folder.mkdir(parents=True)
    path = folder / f"{record.id}.safetensors"
    write_segment(path, record, payload, codec=make_codec("raw"), fingerprint=FINGERPRINT, created_s=0.0)
    assert_same(RemoteTier(open_blobs(f"file://{tmp_path}"), FINGERPRINT).get(record.id), payload)


# ---------------------------------------------------------------- one kind of store


def test_keys_in_the_server(server: Server) -> None:
    blobs = RedisBlobs(server.url)
    blobs._client.flushall()
    record, payload = make_segment(14)
    tier = RemoteTier(blobs, FINGERPRINT)
    tier.put(record, payload)
    assert blobs._client.keys("*") == [f"chunkweave:{FINGERPRINT}:{record.id}".encode()]
    for foreign in (b"other", f"chunkweave:{FINGERPRINT}:readme".encode(), f"chunkweave:{FINGERPRINT}:\xff".encode()):
        blobs._client.set(foreign, b"not ours")
    assert [found.id for found in tier.records()] == [record.id]


def test_a_user_with_few_rights_is_enough(tmp_path: Path) -> None:
    user = (Path(__file__).parents[2] / "deploy" / "valkey.conf").read_text().splitlines()[-1]
    server = Server(tmp_path, lines=(user.replace("A-LONG-RANDOM-PASSWORD", "few-rights"),))
    server.start()
    try:
        blobs = RedisBlobs(f"redis://chunkweave:few-rights@127.0.0.1:{server.port}")
        tier = RemoteTier(blobs, FINGERPRINT, ttl_s=60.0)
        record, payload = make_segment(20)
        tier.put(record, payload)
        assert_same(tier.get(record.id), payload)
        assert tier.nbytes(record.id) > 0
        assert [found.id for found in tier.records()] == [record.id]
        tier.delete(record.id)
        assert tier.get(record.id) is None
    finally:
        server.kill()


def test_time_to_live(server: Server) -> None:
    record, payload = make_segment(15)
    tier = RemoteTier(RedisBlobs(server.url), FINGERPRINT, ttl_s=0.2)
    tier.put(record, payload)
    assert tier.get(record.id) is not None
    time.sleep(0.3)
    assert tier.get(record.id) is None


def test_a_store_that_cannot_expire_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot expire"):
        RemoteTier(FsspecBlobs(f"file://{tmp_path}"), FINGERPRINT, ttl_s=5.0)


def test_tls_verifies_the_certificate(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    lines = (f"tls-cert-file {certificate}", f"tls-key-file {key}", "tls-auth-clients no")
    secured = Server(tmp_path, lines=lines, tls=True)
    try:
        secured.start()
    except AssertionError as problem:
        if "tls" in str(problem).lower():
            pytest.skip("the server is built without TLS")
        raise
    try:
        record, payload = make_segment(16)
        trusting = RemoteTier(RedisBlobs(f"{secured.url}?ssl_ca_certs={certificate}"), FINGERPRINT)
        trusting.put(record, payload)
        assert_same(trusting.get(record.id), payload)
        wary = RemoteTier(RedisBlobs(secured.url), FINGERPRINT)
        assert wary.get(record.id) is None
        assert wary.stats.unavailable == 1
        misnamed_url = secured.url.replace("127.0.0.1", "localhost")
        misnamed = RemoteTier(RedisBlobs(f"{misnamed_url}?ssl_ca_certs={certificate}"), FINGERPRINT)
        assert misnamed.get(record.id) is None
    finally:
        secured.kill()


def test_a_wrong_password_is_a_miss_and_one_warning(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    record, payload = make_segment(17)
    RemoteTier(RedisBlobs(server.url), FINGERPRINT).put(record, payload)
    tier = RemoteTier(RedisBlobs(server.url.replace(PASSWORD, "not-it")), FINGERPRINT)
    for _ in range(10):
        assert tier.get(record.id) is None
    assert tier.breaker.is_open
    warnings = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "PermissionError" in warnings[0].getMessage()
    assert PASSWORD not in caplog.text
    assert "not-it" not in caplog.text
    open_url = server.url.replace(f":{PASSWORD}@", "")
    without = RemoteTier(RedisBlobs(open_url), FINGERPRINT)
    assert without.get(record.id) is None
    with pytest.raises(PermissionError):
        without.put(record, payload)


def test_urls_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-protocol"):
        open_blobs("no-such-protocol://bucket")
    with pytest.raises(UsageError):
        RedisBlobs("redis://127.0.0.1:not-a-port")
    assert isinstance(open_blobs("valkeys://127.0.0.1:1"), RedisBlobs)
    assert isinstance(open_blobs(f"file://{tmp_path}"), FsspecBlobs)


@pytest.mark.parametrize(("package", "url"), [("redis", "redis://127.0.0.1"), ("fsspec", "memory://x")])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str, url: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=re.escape(install_extra("remote"))):
        open_blobs(url)


def test_secrets_stay_out_of_logs(caplog: pytest.LogCaptureFixture) -> None:
    assert without_secrets("rediss://me:secret@host:6379/2?ssl_password=secret") == "rediss://host:6379/2"
    blobs = RedisBlobs("redis://:secret@cache.example:6379")
    assert "clear text" in caplog.text
    assert "secret" not in caplog.text + blobs.name + repr(blobs) + RemoteTier(blobs, FINGERPRINT).breaker.name


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    tier = RemoteTier(open_blobs(f"file://{tmp_path}/cache"), FINGERPRINT)
    record, payload = make_segment(18)
    tier.put(record, payload)
    found = list((tmp_path / "cache").rglob("*"))
    assert [path.name for path in found if path.is_file()] == [f"{record.id}.safetensors"]
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in found)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    tier = RemoteTier(open_blobs(f"file://{tmp_path}"), FINGERPRINT)
    record, payload = make_segment(19)
    tier.put(record, payload)
    folder = tmp_path / FINGERPRINT / record.id[:2]
    (folder / "notes.txt").write_text("mine")
    (folder / f"{record.id}.safetensors.0123.tmp").write_text("half")
    (tmp_path / FINGERPRINT / "zz").mkdir()
    (tmp_path / FINGERPRINT / "zz" / f"{record.id}.safetensors").write_text("in the wrong folder")
    assert [found.id for found in tier.records()] == [record.id]
    tier.delete(record.id)
    assert (folder / "notes.txt").read_text() == "mine"


def _with_version(data: bytes, version: int) -> bytes:
    end = header_size(data[:8], len(data))
    head = data[:end].replace(b'"chunkweave_segment":"0001"', f'"chunkweave_segment":"{version:04}"'.encode(), 1)
    start = head.index(b'"checksum":"') + len(b'"checksum":"')
    blank = head[:start] + b"0" * 32 + head[start + 32 :]
    checksum = hashlib.blake2b(blank, digest_size=16).hexdigest().encode()
    return head[:start] + checksum + head[start + 32 :] + data[end:]
