"""scripts/check_gpu.py: kernels on the CPU, failing parts, and the error without a GPU."""

import json
import sys

import pytest
import torch

from scripts import check_gpu


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", *map(str, arguments)])
    return check_gpu.main()


def test_versions_and_kernels_on_the_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(check_gpu, "HEADS", ((4, 2, 16),))
    assert call(monkeypatch, "versions", "kernels", "--device", "cpu", "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))["parts"]
    assert [line[0] for line in found["kernels"]["lines"]] == ["attention, (4, 2, 16) heads, float32", "rows, float32"]
    assert "error" in capsys.readouterr().out


def test_a_wrong_kernel_fails_the_check(monkeypatch, capsys):
    from offload.kernels import attention

    right = attention.attend
    monkeypatch.setattr(check_gpu, "HEADS", ((4, 2, 16),))
    monkeypatch.setattr(attention, "attend", lambda q, k, v: right(q, k, v * 1.001))
    assert call(monkeypatch, "kernels", "--device", "cpu") == 1
    assert "ArithmeticError: attention" in capsys.readouterr().out


def test_a_failing_part_leaves_its_lines_and_the_others(monkeypatch, capsys):
    def broken(device):
        yield "first", "1"
        raise RuntimeError("no more")

    monkeypatch.setattr(check_gpu, "PARTS", {"broken": broken, "fine": lambda device: iter([("second", "2")])})
    assert call(monkeypatch, "--device", "cpu") == 1
    out = capsys.readouterr().out
    assert "broken: RuntimeError: no more" in out and "first" in out and "fine: done" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    assert call(monkeypatch) == 1
    assert "--device cpu" in capsys.readouterr().err
