"""How many threads compute, on machines that are made of files."""

import pytest
import torch

from chunkweave.models import threads
from chunkweave.models.threads import free_memory_bytes, usable_cpus


@pytest.fixture
def machine(tmp_path):
    """Writes files of a machine; `machine({path: text})` gives its root."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="ascii")
        return tmp_path

    return make


MEMORY = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB"}


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 8000 << 10), ("5000000", 5000000 - 900000 + 200000), ("90000000", 8000 << 10)]
)
def test_a_control_group_limits_memory(machine, limit, free):
    """Its files in the page cache can be dropped."""
    group = "sys/fs/cgroup/user/app/memory."
    counts = {group + "max": limit, group + "current": "900000", group + "stat": "anon 1\ninactive_file 200000"}
    assert free_memory_bytes(machine({**MEMORY, "proc/self/cgroup": "0::/user/app", **counts})) == free


def test_a_control_group_of_the_first_version_limits_memory(machine):
    files = {"limit_in_bytes": "700000", "usage_in_bytes": "300000"}
    files = {f"sys/fs/cgroup/memory/app/memory.{name}": text for name, text in files.items()}
    assert free_memory_bytes(machine({**MEMORY, "proc/self/cgroup": "4:memory:/app\n0::/", **files})) == 400000


def test_free_memory_may_be_unknown(machine):
    assert free_memory_bytes(machine({})) is None


def siblings(cpus, cores):
    """A machine with so many CPUs on so many cores, the second threads of all cores behind the first."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(
            map(str, range(cpu % cores, cpus, cores))
        )
        for cpu in range(cpus)
    }


def test_two_threads_of_a_core_are_one(machine):
    root = machine(siblings(8, 4))
    assert usable_cpus(root, range(8)) == 4
    assert usable_cpus(root, {0, 4}) == 1
    assert usable_cpus(root, {0, 1, 4}) == 2


def test_a_machine_that_says_nothing_has_a_core_a_cpu(machine):
    assert usable_cpus(machine({}), range(6)) == 6


@pytest.mark.parametrize(
    ("limit", "usable"), [("max 100000", 16), ("200000 100000", 2), ("150000 100000", 1), ("20000 100000", 1), ("", 16)]
)
def test_a_quota_of_the_second_version(limit, usable, machine):
    root = machine({"proc/self/cgroup": "0::/user/app", "sys/fs/cgroup/user/app/cpu.max": limit})
    assert usable_cpus(root, range(16)) == usable


def test_the_least_quota_of_all_groups_around_counts(machine):
    files = {
        "proc/self/cgroup": "0::/pod/app",
        "sys/fs/cgroup/pod/app/cpu.max": "max 100000",
        "sys/fs/cgroup/pod/cpu.max": "400000 100000",
    }
    assert usable_cpus(machine(files), range(16)) == 4
    assert usable_cpus(machine({**files, "sys/fs/cgroup/cpu.max": "300000 100000"}), range(16)) == 3


def test_a_container_that_sees_itself_as_the_root(machine):
    root = machine({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert usable_cpus(root, range(16)) == 2


@pytest.mark.parametrize(("quota", "usable"), [("300000", 3), ("-1", 16)])
def test_a_quota_of_the_first_version(quota, usable, machine):
    files = {
        "proc/self/cgroup": "5:memory:/elsewhere\n4:cpu,cpuacct:/app\n0::/",
        "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000",
    }
    assert usable_cpus(machine(files), range(16)) == usable


@pytest.mark.parametrize(("has", "named", "usable", "then"), [(8, None, 2, 2), (2, None, 8, 2), (8, "8", 2, 8)])
def test_threads_are_lowered_unless_the_environment_names_them(has, named, usable, then, monkeypatch):
    found = [has]
    for name in threads._SAYS_HOW_MANY:
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    monkeypatch.setattr(threads, "usable_cpus", lambda: usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: found[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: found.__setitem__(0, count))
    threads.keep_within_cpus()
    assert found == [then]
