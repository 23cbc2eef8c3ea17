"""This machine's rates: measured, saved, put in the place of data sheets; and rates that depend on processors."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.errors import TriforceError, UnusableMeasurement
from offload.hardware import calibration, driver, profiles
from offload.hardware.calibration import Measured, applied, profile_of_found
from offload.hardware.microbenchmarks import BenchmarkSizes, disk_rate, measure
from offload.hardware.profiles import load
from offload.hardware.rates import describe, on_threads, read_share
from offload.hardware.schema import Gpu, Host, Link
from offload.system.machine import usable_cores
from offload.units import counted
from triforce_cli.options.settings import config_home

SMALL = BenchmarkSizes(read=2**26, copy=2**22, host_rows=64, device_rows=256, disk=2**23)
MACHINE = Measured(
    date="2026-01-31",
    machine="1x NVIDIA GeForce RTX 4090, some CPU, 16 cores",
    torch="2.9.0",
    device="cuda",
    gpus=1,
    gpu=Gpu("NVIDIA GeForce RTX 4090", 23.5, 950, 158),
    link=Link("measured", 24.1),
    host=Host(62.5, 55, 800, 16),
)


def test_the_host_is_measured_and_loads_unchanged(set_threads, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_threads(1)
    found = measure("cpu", "some CPU", SMALL)
    assert (found.device, found.gpus, found.gpu, found.link) == ("cpu", 0, None, None)
    assert found.machine == f"some CPU, {counted(usable_cores(), 'core')}"
    assert found.host.cores == 1, "those whose rates were measured"
    assert found.host.memory_gib > 0.1 and found.host.bf16_gflops > 0
    assert calibration.load(tmp_path) is None
    for each in (found, MACHINE):
        path = calibration.save(each, tmp_path / "deep" / "folder")
        path.write_text(f"{path.read_text()}busy: true\n")  # as an earlier version wrote
        assert calibration.load(path.parent) == each
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path):
    assert 0 < disk_rate(tmp_path, SMALL) < 10_000
    assert not list(tmp_path.iterdir())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_and_its_link_are_measured():
    found = measure("cuda", sizes=replace(SMALL, copy=2**26, device_rows=4096))
    assert found.gpu.model == torch.cuda.get_device_name()
    assert 0.1 < found.link.bandwidth_gb_s < found.gpu.bandwidth_gb_s


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    calibration.save(MACHINE, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TriforceError, match=r"cannot write .*: No space left") as caught:
        calibration.save(replace(MACHINE, gpus=4), tmp_path)
    assert "TRIFORCE_CONFIG" in caught.value.hint
    assert calibration.load(tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores: 16", "cores: -1", ": host.cores is -1; data sheets are used instead"),
        ("device: cuda", "device: tpu", ": device is 'tpu'"),
        ("torch:", "touch:", ": unknown key touch"),
        ("gpu:", "gpu: [", ": not valid YAML"),
        ("'2026-01-31'", "2026-01-31", ": date is datetime.date(2026, 1, 31), not text"),
    ],
)
def test_a_corrupt_file_raises_a_warning(tmp_path, old, new, message):
    path = calibration.save(MACHINE, tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UnusableMeasurement) as caught:
        calibration.load(tmp_path)
    assert caught.value.message.startswith(str(path)) and message in caught.value.message


def test_rates_apply_to_the_same_hardware_and_sizes_are_kept():
    profile = load("4090")
    found = applied(profile, MACHINE)
    assert found.gpu == replace(MACHINE.gpu, memory_gib=24)
    assert found.link == replace(MACHINE.link, kind="PCIe 4.0 x16")
    assert found.host == replace(MACHINE.host, memory_gib=None)  # what is free is asked when it is needed
    limited = replace(profile, host=Host(memory_gib=16, cores=4, bandwidth_gb_s=1))
    assert applied(limited, MACHINE).host == Host(16, 55, 800, 4)
    assert applied(load("2x4090"), MACHINE).gpu == found.gpu
    for other in ("a100", "cpu"):
        assert applied(load(other), MACHINE) == load(other)
    assert applied(load("4090"), None) == load("4090")
    cpu = Measured("2026-01-31", "some CPU", "2.9.0", "cpu", host=Host(8, 20, 50, 2))
    assert applied(load("4090"), cpu) == load("4090")
    assert applied(load("cpu"), cpu).host == replace(cpu.host, memory_gib=None)


def test_unknown_hardware_has_a_profile_once_measured():
    found = profile_of_found(["NVIDIA GeForce RTX 4090"] * 2, MACHINE)
    assert (found.device, found.gpus, found.gpu, found.link) == ("cuda", 2, MACHINE.gpu, MACHINE.link)
    assert profile_of_found(["NVIDIA T400"], MACHINE) is None


def test_the_folder_of_settings(tmp_path):
    assert config_home({"TRIFORCE_CONFIG": str(tmp_path)}) == tmp_path
    assert isinstance(config_home({}), Path) and config_home({}).name


@pytest.mark.parametrize(
    ("gpu", "kv", "share"),
    [("h100", "packed", 1.0), ("h200", "packed", 0.89), ("h100", "q8", 0.68), ("rtx-4090", "q8", 1)],
)
def test_instructions_bind_where_memory_gives_more_than_they_read(gpu, kv, share):
    assert read_share(describe(profiles.load(gpu)), kv) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("cores", "gb_s", "threads", "expected"),
    [
        (64, 900, 0, (900, 6400)),
        (64, 900, 8, (168, 800)),  # cores bind
        (64, 900, 48, (900, 4800)),  # memory binds
        (64, 900, 128, (900, 6400)),  # more than cores give no more
        (2, 50, 1, (25, 3200)),  # a core that was measured to read more than most
    ],
)
def test_a_cpu_reads_by_its_threads_until_memory_binds(cores, gb_s, threads, expected):
    host = profiles.Host(bandwidth_gb_s=gb_s, bf16_gflops=6400, cores=cores)
    found = on_threads(describe(replace(profiles.load("cpu"), host=host)), threads)
    assert (found.bandwidth / 1e9, found.flops / 1e9) == pytest.approx(expected)
    assert found.link == found.bandwidth / 2


def test_there_may_be_a_gpu_where_a_driver_or_torch_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(driver, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(driver, "which", lambda name: None)
    monkeypatch.setattr(driver, "version", lambda name: "2.8.0")
    (tmp_path / "null").touch()
    assert not driver.may_have_gpus()
    monkeypatch.setattr(driver, "version", lambda name: "2.8.0+rocm6.4")
    assert driver.may_have_gpus()
    monkeypatch.setattr(driver, "version", lambda name: "2.8.0")
    (tmp_path / "nvidia0").touch()
    assert driver.may_have_gpus()
