"""The cores that a process may use, from the files of Linux as machines and containers have them."""

import psutil
import pytest
import torch

from offload.kernels.native import threads as native_threads
from offload.kernels.native import use_threads
from offload.system.machine import usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(cores, allowed, groups) -> cores` that may be used; `cores` has the processors of each."""

    def call(cores, allowed=None, groups=None):
        everything = [processor for core in cores for processor in core]
        for core in cores:
            for processor in core:
                write(f"sys/devices/system/cpu/cpu{processor}/topology/core_cpus_list", ",".join(map(str, core)))
        for path, text in (groups or {}).items():
            write(path, text)
        monkeypatch.setattr(
            "offload.system.machine.allowed_processors", lambda: set(everything if allowed is None else allowed)
        )
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: len(everything) if logical else len(cores))
        return usable_cores(tmp_path)

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    return call


SMT = [(core, core + 8) for core in range(8)]  # 8 cores of two threads, numbered as Intel and AMD do
HYBRID = [(0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,)]  # 4 fast cores with two threads, 4 slow ones
V2 = {"proc/self/cgroup": "0::/"}


@pytest.mark.parametrize(
    ("cores", "allowed", "groups", "expected"),
    [
        (SMT, None, {}, 8),
        (SMT, [0, 8], {}, 1),  # both threads of a core
        (SMT, [0, 1, 2, 8, 9], {}, 3),
        (HYBRID, None, {}, 8),
        (HYBRID, range(4, 10), {}, 4),
        (SMT, None, V2 | {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),  # docker --cpus 3
        (SMT, None, V2 | {"sys/fs/cgroup/cpu.max": "160000 100000"}, 2),
        (SMT, None, V2 | {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (SMT, None, V2 | {"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        (SMT, [0, 1], V2 | {"sys/fs/cgroup/cpu.max": "300000 100000"}, 2),
        (SMT, None, {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),  # of a parent
    ],
)
def test_cores_on_which_the_process_may_run_and_its_quota(machine, cores, allowed, groups, expected):
    assert machine(cores, allowed, groups=groups) == expected


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpu/docker/1a"])
def test_a_quota_of_control_groups_of_version_1(machine, folder):
    groups = {"proc/self/cgroup": "4:memory:/docker/1a\n3:cpu,cpuacct:/docker/1a\n0::/docker/1a"}
    groups |= {f"{folder}/cpu.cfs_quota_us": "400000", f"{folder}/cpu.cfs_period_us": "100000"}
    assert machine(SMT, groups=groups) == 4
    assert machine(SMT, groups=groups | {f"{folder}/cpu.cfs_quota_us": "-1"}) == 8


def test_threads_are_no_more_than_the_cores_unless_they_are_asked_for(set_threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(native_threads, "usable_cores", lambda: 2)
    found = []
    for before, asked in ((5, 0), (1, 0), (2, 4)):
        set_threads(before)
        use_threads(asked)
        found.append(torch.get_num_threads())
    assert found == [2, 1, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    set_threads(5)
    use_threads(0)
    assert torch.get_num_threads() == 5
