"""`triforce doctor`: the facts and their text; also in an installation without the kernel."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from offload.api.diagnosis import kernel_state, read_rate
from offload.kernels.native import LEVELS
from tests.support.paths import ROOT
from triforce_cli.app import run

NAMES = ["triforce", "device", "processor", "cores", "memory", "kernel", "levels", "families", "models", "prompts"]


# Several command lines in one process, each with what it writes.
IN_TURN = """
import contextlib, io, json, sys
from triforce_cli.app import run, settle_libraries
settle_libraries()
found = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found.append([run(line), out, err])
print(json.dumps([[code, out.getvalue(), err.getvalue()] for code, out, err in found]))
"""


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """`doctor("--json") -> stdout` of a run that must succeed, with an empty cache folder and nothing measured."""
    before = torch.get_num_threads()
    for name in ("DEVICE", "KERNEL", "THREADS", "PROFILE", "COLOR"):
        monkeypatch.delenv(f"TRIFORCE_{name}", raising=False)
    for name in ("HOME", "CONFIG"):
        monkeypatch.setenv(f"TRIFORCE_{name}", str(tmp_path / name.lower()))

    def call(*args):
        code = run(["doctor", "--no-measure", *map(str, args)])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    yield call
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def without_kernel(tmp_path_factory):
    """`run(*command_lines) -> [[exit code, stdout, stderr], ...]` of a copy of the program without a kernel.

    One process for all of them: what takes time is importing torch.
    """
    folder = tmp_path_factory.mktemp("without-kernel")
    unneeded = shutil.ignore_patterns("__pycache__", "_kernel*", "build-error.txt")
    for name in ("offload", "triforce_cli", "profiles"):
        shutil.copytree(ROOT / name, folder / name, ignore=unneeded)
    (folder / "offload" / "kernels" / "native" / "build-error.txt").write_text("CompileError: no gcc\n  in line 2\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIFORCE_", "PYTHON"))}
    env = kept | {"TRIFORCE_HOME": str(folder / "home"), "TRIFORCE_DEVICE": "cpu"}

    def call(*lines):
        command = [sys.executable, "-c", IN_TURN, json.dumps(lines, default=str)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return call


def rows(out):
    """The lines by their names; each is aligned with the first."""
    lines = out.splitlines()
    column = len("processor  ")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    return {line[:column].strip(): line[column:] for line in lines}


def test_lines_of_text(doctor, tmp_path):
    for name, size in (("small", 3), ("large/part", 500), (".partial-1-x", 40)):
        (tmp_path / "home" / "models" / name).mkdir(parents=True)
        (tmp_path / "home" / "models" / name / "file").write_bytes(bytes(size))
    found = rows(doctor())
    gpus = [f"GPU {number}" for number in range(torch.cuda.device_count())]
    assert [name for name in found if name] == NAMES[:2] + gpus + NAMES[2:]
    assert f"torch {torch.__version__}" in found["triforce"]
    assert "GiB free" in found["memory"] and "GB/s" not in found["memory"]
    assert f"{torch.get_num_threads()} thread" in found["cores"]
    assert found["models"].startswith("2 models, ")
    assert found["prompts"].startswith("0 cached prompts, 0.00 GiB, ") and found["prompts"].endswith("prompts")


def test_one_json_object(doctor, tmp_path):
    (line,) = doctor("--json", "--device", "cpu", "--disk", tmp_path).splitlines()
    found = json.loads(line)
    assert {"qwen3", "cohere", "mistral", "gemma3_text"} <= set(found["families"])
    assert (found["type"], found["device"]["used"], found["memory"]["read_gb_s"]) == ("doctor", "cpu", None)
    assert found["memory"]["total_bytes"] >= found["memory"]["free_bytes"] > 0
    assert found["processor"]["name"] and found["processor"]["logical_cores"] >= 1
    assert found["cache"] == {"folder": str(tmp_path / "home"), "models": {}}
    assert found["disk"]["folder"] == str(tmp_path) and found["disk"]["free_bytes"] > 0
    documented = (ROOT / "docs" / "json-events.md").read_text("utf-8")
    assert all(f"`{name}`" in documented for name in found)


def test_the_kernel_in_use_and_all_levels(doctor):
    found = json.loads(doctor("--json"))["kernel"]
    assert found["level"] == (found["levels"][0] if found["levels"] else None)
    for level in LEVELS:
        state = kernel_state(level)
        assert state["level"] == (level if level in found["levels"] else None)
        assert bool(state["reason"]) == (state["level"] is None)


def test_the_kernel_asked_for_by_flag_environment_and_profile(doctor, monkeypatch, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text('name: mine\ndescription: x\ndevice: cpu\noptions: {kernel: "off"}\n')
    assert rows(doctor())["kernel"].endswith("(asked for: auto)")
    assert rows(doctor("--profile", mine))["kernel"] == "none: switched off (asked for: off, by profile mine)"
    monkeypatch.setenv("TRIFORCE_KERNEL", "portable")
    assert rows(doctor("--profile", mine))["kernel"].endswith("(asked for: portable, by environment)")
    assert rows(doctor("--kernel", "off"))["kernel"] == "none: switched off (asked for: off, by flag)"


def test_threads_are_those_that_would_be_used(doctor):
    assert json.loads(doctor("--json", "--threads", "1"))["processor"]["threads"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_reported_with_its_reason(doctor):
    found = json.loads(doctor("--json", "--device", "cuda"))["device"]
    assert (found["asked"], found["used"], found["gpus"]) == ("cuda", None, [])
    assert "no CUDA device" in found["reason"]
    assert rows(doctor("--device", "cuda"))["device"].startswith("none: no CUDA device")


def test_the_read_rate_is_measured_where_memory_is_free():
    assert 0.1 < read_rate(2**28) < 10_000
    assert read_rate(2**20) is None


@pytest.mark.long
def test_without_the_kernel_torch_is_used_unless_a_level_is_asked_for(without_kernel, tiny_model_dir):
    command = ("generate", "Once", "--model", tiny_model_dir, "-n", "4", "--temperature", "0", "--json")
    text, used_torch, refused = without_kernel(("doctor", "--no-measure"), command, (*command, "--kernel", "portable"))
    assert (text[0], text[2]) == (0, "")
    (at,) = [number for number, line in enumerate(text[1].splitlines()) if line.startswith("kernel ")]
    kernel, hint, levels = text[1].splitlines()[at : at + 3]
    assert kernel.endswith(" none: not built: CompileError: no gcc in line 2 (asked for: auto)")
    assert "hint: " in hint and "install a C compiler such as gcc" in hint
    assert levels.split() == ["levels", "none"]
    assert used_torch[0] == 0, used_torch
    assert json.loads(used_torch[1].splitlines()[-1])["settings"]["kernel"] == "off"
    assert refused[:2] == [2, ""]
    error, hint = refused[2].splitlines()
    assert error.startswith("error: the native kernel cannot be used: not built")
    assert "triforce doctor" in hint


def test_a_terminal_breaks_no_word(on_a_terminal_here):
    code, output = on_a_terminal_here("doctor", "--no-measure")
    lines = output.replace("\r", "").splitlines()
    families = next(number for number, line in enumerate(lines) if line.startswith("families"))
    assert code == 0 and all(len(line) <= 80 for line in lines[: families + 2])
    assert lines[families + 1].startswith(" " * 11) and lines[families + 1][11] != " "
