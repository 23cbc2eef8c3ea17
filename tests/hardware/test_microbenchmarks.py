"""Measuring this machine: the host's memory and arithmetic."""

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


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path):
    assert 0 < disk_rate(tmp_path, SMALL) < 10_000
    assert not list(tmp_path.iterdir())
