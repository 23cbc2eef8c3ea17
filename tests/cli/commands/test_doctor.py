"""`triforce doctor`: the facts and their text; also in an installation without the kernel."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from offload.api.diagnosis import kernel_state
from offload.kernels.native import LEVELS
from tests.support.paths import ROOT


@pytest.fixture
def doctor(tmp_path, monkeypatch, triforce_here):
    """`doctor("--json") -> stdout` of a run that must succeed, with an empty cache folder."""
    before = torch.get_num_threads()
    for name in ("DEVICE", "KERNEL", "THREADS", "PROFILE", "COLOR"):
        monkeypatch.delenv(f"TRIFORCE_{name}", raising=False)
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))

    def call(*args):
        code, out, err = triforce_here("doctor", *args)
        assert (code, err) == (0, "")
        return out

    yield call
    torch.set_num_threads(before)


def rows(out):
    """The lines by their names; each is aligned with the first."""
    return {line[:11].strip(): line[11:] for line in out.splitlines() if line[0] != " "}


def test_lines_of_text(doctor, tmp_path):
    found = rows(doctor())
    gpus = [f"GPU {number}" for number in range(torch.cuda.device_count())]
    assert list(found) == ["versions", "device", *gpus, "processor", "memory", "kernel", "families", "cache"]
    assert f"torch {torch.__version__}" in found["versions"]
    assert "GiB free" in found["memory"] and f"{torch.get_num_threads()} thread" in found["processor"]
    assert found["cache"] == str(tmp_path / "home")


def test_one_json_object(doctor, tmp_path):
    (line,) = doctor("--json", "--device", "cpu", "--threads", "1").splitlines()
    found = json.loads(line)
    assert {"qwen3", "cohere", "mistral", "gemma3_text"} <= set(found["families"])
    assert (found["type"], found["device"]["used"]) == ("doctor", "cpu")
    assert found["memory"]["total_bytes"] >= found["memory"]["free_bytes"] > 0
    assert found["processor"]["name"] and found["processor"]["threads"] == 1
    assert found["cache"] == {"folder": str(tmp_path / "home")}
    documented = (ROOT / "docs" / "json-events.md").read_text("utf-8")
    assert all(f"`{name}`" in documented for name in found)
    levels = found["kernel"]["levels"]
    assert found["kernel"]["level"] == (levels[0] if levels else None)
    for level in LEVELS:
        state = kernel_state(level)
        assert state["level"] == (level if level in levels else None)
        assert bool(state["reason"]) == (state["level"] is None)


def test_the_kernel_asked_for_by_flag_environment_and_profile(doctor, monkeypatch, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text('name: mine\ndescription: x\ndevice: cpu\noptions: {kernel: "off"}\n')
    assert rows(doctor())["kernel"].endswith("(asked for: auto)")
    assert rows(doctor("--gpu", mine))["kernel"] == "none: switched off (asked for: off, by profile mine)"
    monkeypatch.setenv("TRIFORCE_KERNEL", "portable")
    assert rows(doctor("--gpu", mine))["kernel"].endswith("(asked for: portable, by environment)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_reported_with_its_reason(doctor):
    assert rows(doctor("--device", "cuda"))["device"].startswith("none: no CUDA device")


@pytest.mark.long
def test_without_the_kernel_torch_is_used_unless_a_level_is_asked_for(tmp_path, tiny_model_dir):
    """By a copy of the program without a kernel."""
    unneeded = shutil.ignore_patterns("__pycache__", "_kernel*", "build-error.txt")
    for name in ("offload", "triforce_cli"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unneeded)
    (tmp_path / "offload" / "kernels" / "native" / "build-error.txt").write_text("CompileError: no gcc\n  in line 2\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIFORCE_", "PYTHON"))}
    env = kept | {"TRIFORCE_HOME": str(tmp_path / "home"), "TRIFORCE_DEVICE": "cpu"}

    def call(*args):
        command = [sys.executable, "-m", "triforce_cli", *args]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    out = call("doctor").stdout
    assert rows(out)["kernel"] == "none: not built: CompileError: no gcc in line 2 (asked for: auto)"
    assert " hint: install a C compiler such as gcc" in out
    command = ("generate", "Once", "--model", tiny_model_dir, "-n", "4", "--temperature", "0", "--json")
    assert json.loads(call(*command).stdout.splitlines()[-1])["settings"]["kernel"] == "off"
    refused = call(*command, "--kernel", "portable")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: the native kernel cannot be used: not built")
    assert "hint: " in refused.stderr and "triforce doctor" in refused.stderr
