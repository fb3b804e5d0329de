"""How many threads compute on a CPU: one a core that this process may use, and no more than its quota of CPU time.

PyTorch takes a thread for every core of the machine. In a container with a quota of two CPUs on a host of sixty-four
that is ten times slower than two threads: the quota is spent in the first milliseconds of each period, and a product
waits for its last thread.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch

_SAYS_HOW_MANY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def keep_within_cpus() -> None:
    """Lower the number of PyTorch's threads to the CPUs there are for this process.

    It is never raised, and left as it is where the environment names one.
    """
    if any(os.environ.get(name) for name in _SAYS_HOW_MANY):
        return
    usable = usable_cpus()
    if torch.get_num_threads() > usable:
        torch.set_num_threads(usable)


def usable_cpus(root: Path = Path("/"), allowed: Collection[int] | None = None) -> int:
    """Cores that have an `allowed` CPU (None: those that this process may run on), or less if a quota gives less.

    Two hyper-threads are one core: they share what multiplies. A quota of one and a half CPUs is one. `root` is where
    `proc` and `sys` are.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(cpu, root) for cpu in allowed}
    quota = _quota_cpus(root)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _core_of(cpu: int, root: Path) -> str:
    """The CPUs of its core as the system lists them; itself where it does not say."""
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(siblings) or str(cpu)


def _quota_cpus(root: Path) -> float | None:
    """The least CPUs' worth of time that a control group of this process gets, or one around it; None if unbounded."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inside = mount / group.lstrip("/")
        for folder in (inside, *inside.parents):
            quotas.append(_quota_of(folder))
            if folder == mount:  # what a container sees as the root may have a quota too
                break
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """CPU seconds a second, of either version of control groups; None if the group says nothing, or no limit."""
    limit, _, period = _read(group / "cpu.max").partition(" ")
    if not period:
        limit, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    with suppress(ValueError, ZeroDivisionError):  # "max", or nothing
        quota = int(limit) / int(period)
        return quota if quota > 0 else None
    return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""
