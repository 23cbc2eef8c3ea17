"""The GPUs that the driver's own program names, without torch."""

import os

import pytest

from triforce_cli import gpus


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts a program called nvidia-smi before everything else on the PATH."""

    def install(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_every_gpu_is_named(driver):
    driver("echo 'NVIDIA GeForce RTX 4090'; echo ' NVIDIA GeForce RTX 4090 '; echo")
    assert gpus.found_gpus() == ["NVIDIA GeForce RTX 4090"] * 2


@pytest.mark.parametrize("script", ["echo 'no driver'; exit 9", "exec sleep 5", "printf '\\377'"])
def test_a_driver_that_does_not_answer_has_no_gpus(driver, monkeypatch, script):
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.2)
    driver(script)
    assert gpus.found_gpus() == []


def test_no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.found_gpus() == []
