"""Whether there may be a GPU, found without importing torch."""

import pytest

from offload.hardware import driver


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without a GPU, and its folder of device files."""
    monkeypatch.setattr(driver, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(driver, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(driver, "which", lambda name: None)
    monkeypatch.setattr(driver, "version", lambda name: "2.8.0")
    return tmp_path


def test_without_a_driver_there_is_no_gpu(bare):
    (bare / "null").touch()
    assert not driver.may_have_gpus()


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "nvhost-gpu", "dxg", "kfd"])
def test_a_device_file_may_be_a_gpu(bare, name):
    (bare / name).touch()
    assert driver.may_have_gpus()


def test_the_drivers_files_program_and_torch_itself_may_know_a_gpu(bare, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(driver, "version", lambda name: "2.8.0+rocm6.4")
        assert driver.may_have_gpus()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "which", lambda name: "/usr/bin/nvidia-smi")
        assert driver.may_have_gpus()
    (bare / "driver" / "0").mkdir(parents=True)
    (bare / "driver" / "0" / "information").write_text("Model: \t\t NVIDIA H200\n")
    assert driver.may_have_gpus()
