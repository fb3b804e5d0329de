"""What happens to files, disks and writers, and that none of it gives a wrong tensor or loses a committed segment.

CHUNKWEAVE_FAULT_RUNS (default 20) is the number of runs that are killed; from 200 on every bit is flipped, not one of
each byte. docs/operating.md has the table.
"""

import errno
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from chunkweave.kv.segment import CODECS, SegmentKV, SegmentLost, make_codec
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.segment_file import DiskSegment
from chunkweave.tiers.segment_header import FileProblem, SegmentHeader, SegmentRefused

from .crash_writer import LAYERS, SEGMENTS, crash_segment
from .segments import FINGERPRINT, files_under, layers_of, make_segment, open_segment

RUNS = int(os.environ.get("CHUNKWEAVE_FAULT_RUNS", "20"))
REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534


def decoded(kv: SegmentKV, codec: str) -> torch.Tensor:
    one = make_codec(codec)
    return torch.stack([one.decode_layer(one.encode_layer(layer), layer.dtype) for layer in kv.kv])


def path_of(root: Path, segment: str) -> Path:
    return root / FINGERPRINT / segment[:2] / f"{segment}.safetensors"


# --- writers that die ---------------------------------------------------------------------------------------------


class Writers:
    """The preloaded process, and what its writers have reported."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.crash_writer"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.committed: set[int] = set()
        self.puts = 0

    def start(self, root: Path, writer: int, seed: int, codec: str, operations: int = 0) -> int:
        self._tell(f"{root}\t{writer}\t{seed}\t{codec}\t{operations}")
        return self._read_until("pid")

    def wait(self) -> None:
        self._tell("wait")
        self._read_until("dead")

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=30)

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read_until(self, word: str) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, *number = line.split()
            if kind == "p":
                self.committed.add(int(number[0]))
                self.puts += 1
            elif kind == "d":
                self.committed.discard(int(number[0]))
            elif kind == word:
                return int(number[0]) if number else 0
        raise AssertionError("the preloaded process is gone")


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    started = Writers()
    yield started
    started.close()


def assert_whole(root: Path, committed: set[int]) -> None:
    """Only whole segments, each equal to what its number says, and every committed one among them."""
    tier = DiskTier(root, FINGERPRINT)
    assert tier.problems() == ()
    found = set()
    numbers = {crash_segment_id(number): number for number in range(SEGMENTS)}
    for record in tier.records():
        source = tier.get(record.id)
        assert source is not None
        _, kv = crash_segment(numbers[record.id])
        assert torch.equal(layers_of(source, LAYERS), decoded(kv, source.header.layout.codec.name))
        found.add(numbers[record.id])
    assert committed <= found, f"lost: {sorted(committed - found)}"


def crash_segment_id(number: int) -> str:
    return crash_segment(number)[0].id


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path, writers: Writers) -> None:
    draw = random.Random(5)
    interrupted = run = 0
    writers.committed.clear()
    while run < RUNS or (not interrupted and run < 20 * RUNS):
        pids = [
            writers.start(tmp_path, writer, 2 * run + writer, draw.choice(sorted(CODECS)))
            for writer in range(1 + run % 2)
        ]
        time.sleep(draw.uniform(0.02, 0.3))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        writers.wait()
        assert_whole(tmp_path, writers.committed)
        leftovers = list((tmp_path / FINGERPRINT).rglob(".*.tmp"))
        interrupted += bool(leftovers)
        for path in leftovers:
            os.utime(path, (0, 0))
        DiskTier(tmp_path, FINGERPRINT)
        assert not list((tmp_path / FINGERPRINT).rglob(".*.tmp"))
        run += 1
    logging.getLogger(__name__).info(
        "%d runs killed, %d in the middle of a write, after %d puts; nothing lost", run, interrupted, writers.puts
    )
    assert interrupted, "no writer was killed in the middle of a write: the test shows nothing"


def test_two_processes_write_the_same_segments(tmp_path: Path, writers: Writers) -> None:
    writers.committed.clear()
    for writer in (0, 1):
        writers.start(tmp_path, writer, writer, "raw", operations=60)
    writers.wait()
    assert len(writers.committed) > 10
    assert_whole(tmp_path, writers.committed)
    assert not list(tmp_path.rglob(".*.tmp"))


# --- bytes that change --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The file of a segment, what is in it, and the layers that it gives."""

    path: Path
    whole: bytes
    header: SegmentHeader
    expected: torch.Tensor


@pytest.fixture(params=sorted(CODECS))
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Written:
    record, kv = make_segment(1)
    DiskTier(tmp_path, FINGERPRINT, codec=request.param).put(record, kv)
    path = path_of(tmp_path, record.id)
    return Written(path, path.read_bytes(), open_segment(path).header, decoded(kv, request.param))


def outcome(written: Written) -> str:
    """`refused`, or the layers that are lost; whatever is read must be right."""
    try:
        source = open_segment(written.path)
    except SegmentRefused:
        return "refused"
    lost = []
    for layer, expected in enumerate(written.expected):
        try:
            assert torch.equal(source.layer(layer), expected), f"a wrong tensor for layer {layer}"
        except SegmentLost:
            lost.append(layer)
    return f"lost {lost}"


@pytest.mark.slow
def test_bit_flips_everywhere(written: Written) -> None:
    header, draw = written.header, random.Random(3)
    for position in range(len(written.whole)):
        for bit in range(8) if RUNS >= 200 else [draw.randrange(8)]:
            damaged = bytearray(written.whole)
            damaged[position] ^= 1 << bit
            written.path.write_bytes(damaged)
            layer = (position - header.data_start) // header.layout.layer_bytes
            region = "refused" if position < header.data_start else f"lost [{layer}]"
            assert outcome(written) == region, f"bit {bit} of byte {position}"


def test_truncation_everywhere_and_extension(written: Written) -> None:
    whole = written.whole
    for length in range(len(whole)):
        written.path.write_bytes(whole[:length])
        assert outcome(written) == "refused", f"{length} of {len(whole)} bytes"
    for tail in (b"\0", whole[-64:], whole):
        written.path.write_bytes(whole + tail)
        assert outcome(written) == "refused"


def test_zeroed_and_exchanged_blocks(written: Written) -> None:
    whole = written.whole
    for start in range(0, len(whole), 64):
        written.path.write_bytes(whole[:start] + bytes(64) + whole[start + 64 :])
        assert outcome(written) != "lost []"
    first, second, third = (written.header.layer_offset(layer) for layer in range(3))
    written.path.write_bytes(whole[:first] + whole[second:third] + whole[first:second] + whole[third:])
    assert outcome(written) == "lost [0, 1]"


def test_damage_after_opening(written: Written) -> None:
    whole, source = written.whole, open_segment(written.path)
    for damage in (whole[:-1], whole + b"\0", bytes(len(whole)), b""):
        written.path.write_bytes(damage)
        with pytest.raises(SegmentLost):
            source.layer(2)
    written.path.write_bytes(whole)
    assert torch.equal(source.layer(2), written.expected[2])


def test_files_replaced_and_deleted_while_they_are_read(tmp_path: Path) -> None:
    record, kv = make_segment(1, layers=8)
    versions = [SegmentKV(kv.kv + version) for version in range(4)]
    tier, other = DiskTier(tmp_path, FINGERPRINT), DiskTier(tmp_path, FINGERPRINT)
    tier.put(record, versions[0])
    stop = threading.Event()

    def disturb() -> None:
        draw = random.Random(1)
        while not stop.is_set():
            other.put(record, draw.choice(versions))
            if draw.random() < 0.3:
                other.delete(record.id)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    outcomes = {"whole": 0, "lost": 0, "missing": 0}
    try:
        for _ in range(400):
            source = tier.get(record.id)
            outcomes["missing" if source is None else read_one_version(source, versions)] += 1
    finally:
        stop.set()
        disturber.join()
    assert outcomes["whole"]
    assert outcomes["lost"] + outcomes["missing"]


def read_one_version(source: DiskSegment, versions: list[SegmentKV]) -> str:
    try:
        read = layers_of(source, 8)
    except SegmentLost:
        return "lost"
    assert any(torch.equal(read, version.kv) for version in versions), "layers of different versions were mixed"
    return "whole"


# --- disks that refuse --------------------------------------------------------------------------------------------


@contextmanager
def small_tmpfs(mebibytes: int) -> Iterator[Path]:
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder = Path(tempfile.mkdtemp(prefix="chunkweave-tmpfs-"))
    try:
        if mount is None or umount is None or os.geteuid() != 0:
            pytest.skip("mounting a tmpfs needs root")
        options = f"size={mebibytes}m,mode=0700"
        done = subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run([umount, "-l", folder], check=True)
    finally:
        folder.rmdir()


def fill_until_refused(tier: DiskTier) -> tuple[list[int], OSError]:
    for number in range(1000):
        try:
            tier.put(*crash_segment(number % SEGMENTS) if number < SEGMENTS else make_segment(number, tokens=400))
        except OSError as error:
            return list(range(number)), error
    raise AssertionError("the disk never filled up")


def test_disk_full() -> None:
    with small_tmpfs(2) as root:
        tier = DiskTier(root, FINGERPRINT)
        fitted, error = fill_until_refused(tier)
        assert error.errno == errno.ENOSPC
        assert 3 < len(fitted) < SEGMENTS
        assert not list(root.rglob(".*.tmp"))
        assert_whole(root, set(fitted))
        refused = crash_segment(len(fitted))
        assert tier.get(refused[0].id) is None
        for number in fitted[-2:]:
            tier.delete(crash_segment_id(number))
        tier.put(*refused)
        assert_whole(root, {*fitted[:-2], len(fitted)})


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The same as a full disk, where nothing can be mounted."""
    tier = DiskTier(tmp_path, FINGERPRINT)
    tier.put(*crash_segment(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r".") as refused:
            tier.put(*crash_segment(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG
    assert files_under(tmp_path) == [path_of(tmp_path, crash_segment_id(0))]
    assert_whole(tmp_path, {0})


def test_read_only_mount() -> None:
    with small_tmpfs(4) as root:
        DiskTier(root, FINGERPRINT).put(*crash_segment(0))
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        assert_refuses_changes_and_reads(root)


def assert_refuses_changes_and_reads(root: Path) -> None:
    """Read, refuse to write, and stop using what cannot be deleted."""
    tier = DiskTier(root, FINGERPRINT)
    assert_whole(root, {0})
    with pytest.raises(OSError, match=r".") as refused:
        tier.put(*crash_segment(1))
    assert refused.value.errno in (errno.EROFS, errno.EACCES)
    assert not list(root.rglob(".*.tmp"))
    for _ in range(2):
        with pytest.raises(OSError, match="could not be removed"):
            tier.delete(crash_segment(0)[0].id)
    assert tier.get(crash_segment(0)[0].id) is None
    assert [problem.problem for problem in tier.problems()] == [FileProblem.UNDELETABLE]
    assert path_of(root, crash_segment_id(0)).exists()


def unprivileged(check: Callable[[], None]) -> None:
    """Run `check` in a child that is not root, since permissions do not bind root."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the child starts none
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)  # a child that hangs ends
            torch.set_num_threads(1)  # OpenMP's own threads did not come along: using them would wait for ever
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            check()
            status = 0
        except BaseException as error:  # noqa: BLE001  (the child must not return into pytest)
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="chunkweave-faults-"))
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(folder)


def one_segment_in(folder: Path) -> Path:
    root = folder / "cache"
    DiskTier(root, FINGERPRINT).put(*crash_segment(0))
    return root


def permissions(root: Path, folders: int, files: int) -> None:
    for path in [*files_under(root), *(path for path in root.rglob("*") if path.is_dir())][::-1]:
        path.chmod(folders if path.is_dir() else files)


def test_read_only_folders(open_folder: Path) -> None:
    root = one_segment_in(open_folder)
    permissions(open_folder, 0o555, 0o444)
    unprivileged(lambda: assert_refuses_changes_and_reads(root))


def test_unreadable_files(open_folder: Path) -> None:
    root = one_segment_in(open_folder)
    permissions(open_folder, 0o755, 0o000)

    def check() -> None:
        tier = DiskTier(root, FINGERPRINT)
        assert tier.get(crash_segment(0)[0].id) is None
        assert [problem.problem for problem in tier.problems()] == [FileProblem.UNREADABLE]
        assert tier.repair() == ()

    unprivileged(check)
    assert path_of(root, crash_segment_id(0)).exists()


def test_unreadable_folders(open_folder: Path) -> None:
    root = one_segment_in(open_folder)
    (root / FINGERPRINT).chmod(0o000)

    def check() -> None:
        tier = DiskTier(root, FINGERPRINT)
        assert tier.get(crash_segment(0)[0].id) is None
        assert list(tier.records()) == []
        assert [problem.problem for problem in tier.problems()] == [FileProblem.UNREADABLE]
        with pytest.raises(PermissionError):
            tier.put(*crash_segment(1))

    unprivileged(check)
    (root / FINGERPRINT).chmod(0o700)
    assert_whole(root, {0})


def test_what_was_unreadable_is_used_once_it_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, kv = make_segment(1)
    DiskTier(tmp_path, FINGERPRINT).put(record, kv)
    with monkeypatch.context() as patch:
        patch.setattr("chunkweave.tiers.segment_file.os.pread", out_of_descriptors)
        tier = DiskTier(tmp_path, FINGERPRINT)
        assert tier.get(record.id) is None
    assert torch.equal(layers_of(tier.get(record.id)), kv.kv)
    assert tier.problems() == ()


def out_of_descriptors(*args: object) -> bytes:
    raise OSError(errno.EMFILE, "too many open files")
