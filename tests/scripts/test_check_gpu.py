"""scripts/check_gpu.sh: every part at a small size on the CPU, failing parts, and the error without a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.paths import SCRIPTS

PARTS = ["tests", "link", "overlap", "decoding", "long context"]


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_gpu

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", *map(str, arguments)])
        return check_gpu.main()

    run.module = check_gpu
    return run


def test_every_part_runs_on_the_cpu_and_the_table_is_printed_last(check, tmp_path, capsys):
    assert check("--device", "cpu", tmp_path / "results") == 0
    table = capsys.readouterr().out
    kept, written = sorted((tmp_path / "results").iterdir())
    assert written.suffix == ".md" and written.read_text("utf-8") == table
    results = json.loads(kept.read_text("utf-8"))
    assert list(results) == ["machine", *PARTS]
    assert {results[part]["state"] for part in PARTS} == {"done"}
    assert results["machine"]["date"] in table and "wanted below 1.15" in table
    methods = results["decoding"]["methods"]
    assert methods["retrieval"]["ids"] == methods["auto"]["ids"] == methods["ar"]["ids"]
    assert "streaming" in results["long context"]["steps_s"]


def test_a_part_that_raises_or_times_out_does_not_stop_the_others(check, tmp_path, monkeypatch, capsys):
    def fail(rows):
        raise OSError("a loose cable")

    def hang(rows):
        rows.append(("so far", "2", ""))
        while True:
            pass

    parts = [("first", 5, fail), ("second", 1, hang), ("third", 5, lambda rows: rows.append(("x", "1", "")) or {})]
    monkeypatch.setattr(check.module, "parts", lambda device: parts)
    assert check("--device", "cpu", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[:2] == ["| first |  | failed | OSError: a loose cable |", "| second | so far | 2 |  |"]
    assert lines[2:] == ["| second |  | skipped | took longer than 1 s |", "| third | x | 1 |  |"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_an_error_with_a_hint(tmp_path):
    run = subprocess.run(
        [SCRIPTS / "check_gpu.sh", tmp_path / "results"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.startswith("error: no CUDA GPU") and "\nhint: " in run.stderr
    assert not (tmp_path / "results").exists()
