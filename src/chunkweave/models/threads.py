"""What this process may use of the machine: compute threads, one per core within its quota of CPU time, and memory.

PyTorch starts one thread per core of the machine. In a container with a quota of two CPUs on a host of sixty-four this
is ten times slower than two threads: the quota is used up in the first milliseconds of each period, and a product waits
for its last thread.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from chunkweave.errors import UsageError

_SAYS_HOW_MANY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def use_threads(count: int | None) -> None:
    """Have PyTorch compute with so many threads in this process; None: as many as there are CPUs for it.

    Raises:
        UsageError: less than one.
    """
    if count is None:
        keep_within_cpus()
        return
    if count < 1:
        raise UsageError(f"threads must be at least 1, not {count}")
    torch.set_num_threads(count)


def keep_within_cpus() -> None:
    """Lower PyTorch's number of threads to the CPUs available to this process.

    The number is never raised, and not changed if the environment sets one.
    """
    if any(os.environ.get(name) for name in _SAYS_HOW_MANY):
        return
    usable = usable_cpus()
    if torch.get_num_threads() > usable:
        torch.set_num_threads(usable)


def usable_cpus(root: Path = Path("/"), allowed: Collection[int] | None = None) -> int:
    """Cores with an `allowed` CPU (None: those that this process may run on), or fewer if a quota says so.

    Two hyper-threads count as one core: they share arithmetic units. A quota of one and a half CPUs counts as one.
    `root` is the folder with `proc` and `sys`.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(cpu, root) for cpu in allowed}
    quota = _quota_cpus(root)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _core_of(cpu: int, root: Path) -> str:
    """The CPUs of a CPU's core as the system lists them; the CPU itself if unknown."""
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(siblings) or str(cpu)


def _quota_cpus(root: Path) -> float | None:
    """The lowest CPU quota of this process's control groups and their parents, in CPUs; None if unlimited."""
    quotas = map(_quota_of, _groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """What the machine has free, or less if a control group of this process has less left; None if unknown."""
    available = [
        int(line.split()[1]) << 10 for line in _read(root / "proc/meminfo").splitlines() if "MemAvailable" in line
    ]
    for group in _groups("memory", root):
        names = ("memory.max", "memory.current") if (group / "memory.max").exists() else _FIRST_VERSION
        with suppress(ValueError):  # "max", or nothing
            limit, used = (int(_read(group / name)) for name in names)
            statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            available.append(limit - used + int(statistics.get("inactive_file", 0)))
    return min(available, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups and their parents."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inside = mount / group.lstrip("/")
        for folder in (inside, *inside.parents):
            yield folder
            if folder == mount:  # the root group that a container sees may have a limit too
                break


def _quota_of(group: Path) -> float | None:
    """CPU seconds per second, from either version of control groups; None without a limit."""
    limit, _, period = _read(group / "cpu.max").partition(" ")
    if not period:
        limit = _read(group / "cpu.cfs_quota_us")
        period = _read(group / "cpu.cfs_period_us")
    with suppress(ValueError, ZeroDivisionError):  # "max", or nothing
        quota = int(limit) / int(period)
        return quota if quota > 0 else None
    return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""
