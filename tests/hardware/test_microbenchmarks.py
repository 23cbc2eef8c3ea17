"""Measuring this machine: the host's memory and arithmetic."""

import pytest
import torch

from offload.hardware import microbenchmarks
from offload.hardware.microbenchmarks import BenchmarkSizes, disk_rate, measure
from offload.system.machine import usable_cores
from offload.units import counted

SMALL = BenchmarkSizes(read=2**26, copy=2**22, host_rows=64, device_rows=256, disk=2**23)


def test_the_host_is_measured(set_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_threads(1)
    found = measure("cpu", "some CPU", SMALL)
    assert (found.device, found.gpus, found.gpu, found.link) == ("cpu", 0, None, None)
    assert found.machine == f"some CPU, {counted(usable_cores(), 'core')}"
    assert found.host.cores == 1, "those whose rates were measured"
    assert found.host.memory_gib > 0.1 and found.host.bf16_gflops > 0
    assert found.host.bandwidth_gb_s is None or 0.1 < found.host.bandwidth_gb_s < 10_000


@pytest.mark.usefixtures("set_threads")
@pytest.mark.parametrize(("share", "busy"), [(0.1, True), (0.9, False)])
def test_a_measurement_that_got_too_little_of_its_cores_is_of_a_busy_machine(monkeypatch, share, busy):
    used = lambda: share * torch.get_num_threads() * microbenchmarks.perf_counter()  # noqa: E731
    monkeypatch.setattr(microbenchmarks, "process_time", used)
    assert measure("cpu", "some CPU", SMALL).busy is busy


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path):
    assert 0 < disk_rate(tmp_path, SMALL) < 10_000
    assert not list(tmp_path.iterdir())
