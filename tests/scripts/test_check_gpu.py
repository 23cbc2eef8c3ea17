"""scripts/check_gpu.py: results at once, failing and slow steps, the table; a rehearsal of two steps on a CPU."""

import json
import subprocess
import sys

import pytest
import torch

from scripts import check_gpu
from scripts.check_gpu import Result, Step
from tests.support.paths import ROOT


def results(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def steps(monkeypatch):
    def broken(device):
        yield Result("first", 10.0, "ms", 4.0)
        raise RuntimeError("no more")

    found = {1: Step("broken", 60, broken), 2: Step("fine", 60, lambda device: iter([Result("second", device)]))}
    monkeypatch.setattr(check_gpu, "STEPS", found)
    return found


def test_a_failing_step_leaves_its_results_and_the_other_steps(steps, tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    assert [check_gpu.run_step(number, "cpu", path) for number in steps] == [1, 0]
    assert [row.get("what") or row["failure"] for row in results(path)] == [
        "first",
        "RuntimeError: no more",
        "second",
        None,
    ]
    assert check_gpu.print_table(path, list(steps))
    table = capsys.readouterr().out
    assert "1 broken: RuntimeError: no more" in table and "10 ms; planned 4: x 2.50" in table
    assert "2 fine: done" in table


def test_a_step_ends_at_its_limit(steps, tmp_path):
    path = tmp_path / "results.jsonl"
    steps[1] = steps[1]._replace(limit=0)
    check_gpu.supervise(1, "cpu", path)
    assert results(path)[-1]["failure"] == "took more than 0 s"


def test_the_reference_attends_causally():
    q, keys, values = torch.randn(2, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    whole = check_gpu.exact_attention(q, keys, values)
    first = check_gpu.exact_attention(q[:1], keys[:, :4], values[:, :4])
    torch.testing.assert_close(whole[:1], first)


@pytest.mark.long
def test_kernels_are_rehearsed_where_modules_are_missing(tmp_path):
    pytest.importorskip("triton")
    command = [ROOT / "scripts/check_gpu.sh", "--device", "cpu", "--only", "1,2", "--json", tmp_path / "results.jsonl"]
    environment = {"PYTHON": sys.executable, "MISSING": "gguf,platformdirs,uvicorn", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packed, 4/2 heads" in done.stdout
    found = {row["what"]: row["value"] for row in results(tmp_path / "results.jsonl") if "what" in row}
    assert (found["gguf"], found["platformdirs"]) == ("missing", "installed")
