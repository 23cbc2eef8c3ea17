"""Keeping what was measured, and putting it in the place of data sheets."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offload.errors import TriforceError, UnusableMeasurement
from offload.hardware import calibration
from offload.hardware.calibration import Measured, applied, profile_of
from offload.hardware.microbenchmarks import BenchmarkSizes, measure
from offload.hardware.profiles import load
from offload.hardware.schema import Gpu, Host, Link
from triforce_cli.options.settings import config_home

SMALL = BenchmarkSizes(read=2**26, copy=2**22, host_rows=64, device_rows=256)


MACHINE = Measured(
    date="2026-01-31",
    machine="1x NVIDIA GeForce RTX 4090, some CPU, 16 cores",
    torch="2.9.0",
    device="cuda",
    gpus=1,
    gpu=Gpu("NVIDIA GeForce RTX 4090", 23.5, 950, 158),
    link=Link("pinned memory, measured", 24.1, 25.2, 9.5, 11),
    host=Host(62.5, 55, 800, 16),
)


def test_a_saved_measurement_loads_unchanged(tmp_path):
    assert calibration.load(tmp_path) is None
    for found in (measure("cpu", "some CPU", SMALL), MACHINE):
        path = calibration.save(found, tmp_path / "deep" / "folder")
        assert calibration.load(path.parent) == found
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    calibration.save(MACHINE, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TriforceError, match=r"cannot write .*measured\.yaml: No space left") as caught:
        calibration.save(replace(MACHINE, gpus=4), tmp_path)
    assert "TRIFORCE_CONFIG" in caught.value.hint
    assert calibration.load(tmp_path) == MACHINE
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores: 16", "cores: -1", ": host.cores is -1; data sheets are used instead"),
        ("device: cuda", "device: tpu", ", line 5: device is 'tpu'"),
        ("torch:", "touch:", ", line 4: unknown key touch"),
        ("gpu:", "gpu: [", ": not valid YAML"),
        ("'2026-01-31'", "2026-01-31", ", line 2: date is datetime.date(2026, 1, 31), not text"),
    ],
)
def test_a_corrupt_file_raises_a_warning(tmp_path, old, new, message):
    path = calibration.save(MACHINE, tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UnusableMeasurement) as caught:
        calibration.load(tmp_path)
    assert caught.value.message.startswith(f"{path}, line ") and message in caught.value.message


def test_an_unreadable_file_raises_a_warning(tmp_path):
    (tmp_path / calibration.FILE).mkdir()
    with pytest.raises(UnusableMeasurement, match="cannot read"):
        calibration.load(tmp_path)
    (tmp_path / calibration.FILE).rmdir()
    (tmp_path / calibration.FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(UnusableMeasurement, match="not UTF-8"):
        calibration.load(tmp_path)


def test_rates_apply_to_the_same_hardware_and_sizes_are_kept():
    profile = load("4090")
    found = applied(profile, MACHINE)
    assert found.gpu == replace(MACHINE.gpu, memory_gib=24)
    assert found.link == replace(MACHINE.link, kind="PCIe 4.0 x16")
    assert found.host == replace(MACHINE.host, memory_gib=None)  # what is free is asked when it is needed
    assert (found.name, found.options) == (profile.name, profile.options)
    limited = replace(profile, host=Host(memory_gib=16, cores=4, bandwidth_gb_s=1))
    assert applied(limited, MACHINE).host == Host(16, 55, 800, 4)
    assert applied(load("2x4090"), MACHINE).gpu == found.gpu


def test_rates_do_not_apply_to_other_hardware():
    assert applied(load("a100"), MACHINE) == load("a100")
    assert applied(load("cpu"), MACHINE) == load("cpu")
    assert applied(load("4090"), None) == load("4090")
    cpu = Measured("2026-01-31", "some CPU", "2.9.0", "cpu", host=Host(8, 20, 50, 2))
    assert applied(load("4090"), cpu) == load("4090")
    assert applied(load("cpu"), cpu).host == replace(cpu.host, memory_gib=None)


def test_unknown_hardware_has_a_profile_once_measured():
    profile = profile_of(MACHINE)
    assert (profile.device, profile.gpu, profile.link, profile.host) == (
        "cuda",
        MACHINE.gpu,
        MACHINE.link,
        MACHINE.host,
    )


def test_the_folder_of_settings(tmp_path):
    assert config_home({"TRIFORCE_CONFIG": str(tmp_path)}) == tmp_path
    assert isinstance(config_home({}), Path) and config_home({}).name


def test_reading_measurements_imports_no_torch():
    code = "import sys, offload.hardware.calibration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
