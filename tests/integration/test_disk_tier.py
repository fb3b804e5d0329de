"""The disk tier: what it keeps over a restart, what it shares, what it refuses to touch."""

import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentKV, SegmentLost, SegmentSource, make_codec
from chunkweave.store.records import SegmentRecord
from chunkweave.store.tier import Tier
from chunkweave.tiers import segment_header
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.segment_file import layout_of, write_segment
from chunkweave.tiers.segment_header import FileProblem, header_bytes
from chunkweave.types import ChunkId, SegmentId

from .segments import FINGERPRINT, files_under, layers_of, make_segment


def open_tier(root: Path, **options) -> DiskTier:
    tier = DiskTier(root, FINGERPRINT, **options)
    _: Tier[SegmentSource] = tier
    return tier


def fill(tier: DiskTier, count: int) -> list[tuple[SegmentId, SegmentKV]]:
    held = []
    for number in range(count):
        record, kv = make_segment(number)
        tier.put(record, kv)
        held.append((record.id, kv))
    return held


def path_of(root: Path, segment: str) -> Path:
    return root / FINGERPRINT / segment[:2] / f"{segment}.safetensors"


def kinds(tier: DiskTier) -> list[FileProblem]:
    return [problem.problem for problem in tier.problems()]


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
def test_put_get_restart_delete(tmp_path: Path, codec: str) -> None:
    tier = open_tier(tmp_path / "cache", codec=codec)
    assert list(tier.records()) == []
    assert files_under(tmp_path) == []
    record, kv = make_segment(1)
    expected = tier.size_of(record, kv)
    tier.put(record, kv)
    for opened in (tier, open_tier(tmp_path / "cache")):
        assert opened.nbytes(record.id) == expected == path_of(tmp_path / "cache", record.id).stat().st_size
        assert list(opened.records()) == [replace(record, nbytes=expected)]
        assert float((layers_of(opened.get(record.id)) - kv.kv).float().norm() / kv.kv.float().norm()) < 0.05
        assert opened.problems() == ()
    tier.delete(record.id)
    tier.delete(record.id)
    assert tier.get(record.id) is None
    assert (tier.nbytes(record.id), list(tier.records()), files_under(tmp_path)) == (0, [], [])


def test_folders_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        fill(open_tier(tmp_path / "a" / "cache"), 3)
    finally:
        os.umask(previous)
    for path in (tmp_path / "a" / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700


def test_another_process_adds_replaces_and_deletes(tmp_path: Path) -> None:
    mine, theirs = open_tier(tmp_path), open_tier(tmp_path)
    record, kv = make_segment(1)
    theirs.put(record, kv)
    assert list(mine.records()) == []
    assert mine.nbytes(record.id) == theirs.nbytes(record.id) > 0
    assert [held.id for held in mine.records()] == [record.id]
    theirs.put(record, SegmentKV(kv.kv * 2))
    got = mine.get(record.id)
    assert torch.equal(layers_of(got), kv.kv * 2)
    assert len(list(mine.records())) == len(list(theirs.records())) == 1
    theirs.delete(record.id)
    with pytest.raises(SegmentLost):
        got.layer(0)
    assert mine.get(record.id) is None
    assert (mine.nbytes(record.id), list(mine.records())) == (0, [])


@pytest.mark.parametrize("segment", ["", "..", "../../etc/passwd", "a" * 31, "A" * 32, "a" * 31 + "/", "a" * 32 + "\n"])
def test_no_id_leads_out_of_the_folder(tmp_path: Path, segment: str) -> None:
    tier = open_tier(tmp_path)
    evil = SegmentId(segment)
    assert (tier.get(evil), tier.nbytes(evil)) == (None, 0)
    tier.delete(evil)
    record, kv = make_segment(1)
    object.__setattr__(record, "id", evil)
    with pytest.raises(UsageError):
        tier.put(record, kv)
    assert files_under(tmp_path) == []


@pytest.mark.parametrize("fingerprint", ["", ".", "..", "a/b", "../x", "a" * 200, "ä"])
def test_no_fingerprint_leads_out_of_the_folder(tmp_path: Path, fingerprint: str) -> None:
    with pytest.raises(UsageError):
        DiskTier(tmp_path, fingerprint)


def test_links_are_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    ((segment, kv),) = fill(open_tier(outside), 1)
    real = path_of(outside, segment)
    before = real.read_bytes()
    for depth in (0, 1, 2):
        root = tmp_path / f"linked{depth}"
        link = [root / FINGERPRINT, path_of(root, segment).parent, path_of(root, segment)][depth]
        link.parent.mkdir(parents=True)
        link.symlink_to([outside / FINGERPRINT, real.parent, real][depth])
        for opened_first in (True, False):
            tier = open_tier(root)
            assert kinds(tier) == [FileProblem.FOREIGN]
            if opened_first:
                assert tier.get(segment) is None
            with pytest.raises(OSError, match=r"exist|not replaced"):
                tier.put(make_segment(0)[0], kv)
            tier.delete(segment)
            assert tier.repair() == ()
        assert link.is_symlink()
        assert real.read_bytes() == before


def test_foreign_files_are_counted_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ((segment, kv),) = fill(open_tier(tmp_path), 1)
    shard = path_of(tmp_path, segment).parent
    strangers = [tmp_path / FINGERPRINT / "README", shard / "notes.txt", shard / "x.safetensors", shard / ".hidden.tmp"]
    for path in strangers:
        path.write_text("mine")
    wrong_shard = tmp_path / FINGERPRINT / ("00" if segment[:2] != "00" else "01") / f"{segment}.safetensors"
    wrong_shard.parent.mkdir()
    wrong_shard.write_bytes(path_of(tmp_path, segment).read_bytes())
    other_model = DiskTier(tmp_path, "0" * 32)
    tier = open_tier(tmp_path)
    assert [problem.path for problem in tier.problems()] == sorted([*strangers, wrong_shard])
    assert set(kinds(tier)) == {FileProblem.FOREIGN}
    assert "5 foreign" in caplog.text
    assert tier.repair() == ()
    assert all(path.read_text() == "mine" for path in strangers)
    assert list(other_model.records()) == []
    assert torch.equal(layers_of(tier.get(segment)), kv.kv)


def test_a_segment_of_another_model_is_not_used(tmp_path: Path) -> None:
    record, kv = make_segment(1)
    path = path_of(tmp_path, record.id)
    path.parent.mkdir(parents=True)
    write_segment(path, record, kv, codec=make_codec("raw"), fingerprint="0" * 32, created_s=0)
    tier = open_tier(tmp_path)
    assert tier.get(record.id) is None
    assert kinds(tier) == [FileProblem.FOREIGN]


def test_corrupt_files_are_refused_until_repaired_or_replaced(tmp_path: Path) -> None:
    segments = fill(open_tier(tmp_path), 3)
    for segment, _ in segments[:2]:
        os.truncate(path_of(tmp_path, segment), 700)
    tier = open_tier(tmp_path)
    assert len(list(tier.records())) == 1
    assert kinds(tier) == [FileProblem.CORRUPT] * 2
    assert all(tier.get(segment) is None and tier.nbytes(segment) == 0 for segment, _ in segments[:2])
    assert len(files_under(tmp_path)) == 3
    tier.put(*make_segment(0))
    assert tier.repair() == (path_of(tmp_path, segments[1][0]),)
    assert tier.problems() == ()
    assert open_tier(tmp_path).problems() == ()
    assert len(list(open_tier(tmp_path).records())) == 2


def test_damage_in_the_data_is_found_by_verify(tmp_path: Path) -> None:
    (segment, _), _ = fill(open_tier(tmp_path), 2)
    path = path_of(tmp_path, segment)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tier = open_tier(tmp_path)
    assert tier.problems() == ()
    tier.verify()
    assert kinds(tier) == [FileProblem.CORRUPT]
    assert (tier.get(segment), tier.nbytes(segment)) == (None, 0)
    assert tier.repair() == (path,)
    assert len(list(open_tier(tmp_path).records())) == 1


def test_repair_spares_what_was_replaced_meanwhile(tmp_path: Path) -> None:
    ((segment, _),) = fill(open_tier(tmp_path), 1)
    os.truncate(path_of(tmp_path, segment), 100)
    tier = open_tier(tmp_path)
    fill(open_tier(tmp_path), 1)
    assert tier.repair() == ()
    assert tier.get(segment) is not None


def test_another_version_is_neither_read_replaced_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        newer = segment_header.FORMAT_VERSION + 1
        patch.setattr(segment_header, "FORMAT_VERSION", newer)
        ((segment, kv),) = fill(open_tier(tmp_path), 1)
    before = path_of(tmp_path, segment).read_bytes()
    tier = open_tier(tmp_path)
    assert kinds(tier) == [FileProblem.OTHER_VERSION]
    assert tier.get(segment) is None
    with pytest.raises(OSError, match=f"version {newer}"):
        tier.put(make_segment(0)[0], kv)
    tier.delete(segment)
    assert tier.repair() == ()
    assert path_of(tmp_path, segment).read_bytes() == before


def test_only_old_temporary_files_are_removed(tmp_path: Path) -> None:
    ((segment, _),) = fill(open_tier(tmp_path), 1)
    shard = path_of(tmp_path, segment).parent
    old, young = shard / f".{segment}.{'0' * 16}.tmp", shard / f".{segment}.{'1' * 16}.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3700, time.time() - 3700))
    tier = open_tier(tmp_path)
    assert (old.exists(), young.exists(), tier.problems()) == (False, True, ())


def test_a_file_says_when_it_was_written(tmp_path: Path) -> None:
    now = [1000.0]
    tier = open_tier(tmp_path, clock=lambda: now[0])
    first, second = make_segment(0), make_segment(1)
    tier.put(*first)
    now[0] = 1030.0
    tier.put(*second)
    for opened in (tier, open_tier(tmp_path)):
        assert [opened.stored_at_s(record.id) for record, _ in (first, second)] == [1000.0, 1030.0]
        assert opened.stored_at_s(make_segment(2)[0].id) is None


@pytest.mark.slow
@pytest.mark.timed
def test_ten_thousand_segments_are_indexed_in_five_seconds(tmp_path: Path) -> None:
    _, kv = make_segment(0, layers=24, tokens=128, kv_heads=1, head_dim=1)
    layout = layout_of(kv, make_codec("raw"))
    for number in range(10_000):
        record = SegmentRecord.of(ChunkId(f"{number:032x}"), (), tuple(range(128)), exact=True, nbytes=kv.nbytes)
        path = path_of(tmp_path, record.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header_bytes(record, FINGERPRINT, layout, 0.0, (0,) * 24) + bytes(kv.nbytes))
    started = time.perf_counter()
    tier = open_tier(tmp_path)
    took_s = time.perf_counter() - started
    assert len(list(tier.records())) == 10_000
    assert tier.problems() == ()
    assert took_s < 5.0
