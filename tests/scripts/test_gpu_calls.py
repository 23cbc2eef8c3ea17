"""The five calls of check_gpu.sh: their time, what is run again, and faults that their parts must find."""

import json
import subprocess
import sys

import pytest
import torch

from tests.support.paths import ROOT, SCRIPTS

CALLS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_less_than_ten_minutes_and_all_its_parts_can_be_imported(call, tmp_path):
    import gpu_calls

    parts = list(gpu_calls.call_parts(call, "cpu", tmp_path, tmp_path / "log"))
    assert sum(seconds for _, seconds, _ in parts) <= gpu_calls.LIMIT
    assert parts[0][0] == "kernel", "without it, other parts measure what no user has"
    assert len({name for name, *_ in parts}) == len(parts)
    assert not any(getattr(run, "func", None) is gpu_calls._raise for *_, run in parts)


def test_the_first_call_has_what_says_whether_the_kernels_are_right(tmp_path):
    import gpu_calls

    names = [name for name, *_ in gpu_calls.call_parts(1, "cpu", tmp_path, tmp_path / "log")]
    assert names == ["kernel", "facts", "pinning", "link sizes", "kernels", "tests"]


def results(folder, call, kind="gpu", **states):
    """Write the results of a call: of parts that are done, have failed, or were off."""
    parts = {
        name: {"state": "done" if state == "off" else state, "off": ["x"] * (state == "off")}
        for name, state in states.items()
    }
    (folder / f"2026-01-01-{kind}-card-call{call}.json").write_text(json.dumps({"machine": {"kind": kind}} | parts))


def test_the_last_call_runs_again_what_has_failed_or_was_off(tmp_path):
    import gpu_calls

    results(tmp_path, 1, kernel="done", kernels="failed", tests="done")
    results(tmp_path, 2, rates="done", attention="done", linears="off")
    results(tmp_path, 3, rates="done", pages="skipped")
    again = [name for name, *_ in gpu_calls.call_parts(5, "cpu", tmp_path, tmp_path / "log")]
    assert again == ["kernel", "kernels", "kernel", "rates", "linears"]
    assert gpu_calls.failed_parts(tmp_path, 3) == gpu_calls.failed_parts(tmp_path, 4) == set()


def test_the_last_call_leaves_out_what_it_has_no_time_for(tmp_path):
    import gpu_calls

    results(tmp_path, 1, tests="failed", kernels="failed")
    results(tmp_path, 2, attention="failed", linears="failed", sanitizer="failed")
    again = list(gpu_calls.call_parts(5, "cpu", tmp_path, tmp_path / "log"))
    assert sum(seconds for _, seconds, _ in again) < gpu_calls.LIMIT
    assert "tests" in [name for name, *_ in again] and "sanitizer" not in [name for name, *_ in again]


def test_times_are_off_on_a_gpu_alone(tmp_path):
    import gpu_calls

    results(tmp_path, 2, "miniature", linears="off")
    assert gpu_calls.failed_parts(tmp_path, 2) == set()


@pytest.mark.parametrize("damage", ["a key less", "another scale"])
def test_attention_that_is_wrong_is_found(monkeypatch, damage):
    import gpu_attention
    from gpu_machine import Machine
    from gpu_rows import Rows

    from offload.memory import page

    right = page.attend
    wrong = {
        "a key less": lambda q, k, v: right(q, k[:, :-1], v[:, :-1]),
        "another scale": lambda q, k, v: right(q * 1.01, k, v),
    }
    monkeypatch.setattr(gpu_attention, "HEADS", {"small": (4, 2, 16)})
    machine, rows = Machine("cpu"), Rows()
    gpu_attention.kernels(machine, rows)
    monkeypatch.setattr(page, "attend", wrong[damage])
    with pytest.raises(ArithmeticError, match="small, plain, float32"):
        gpu_attention.kernels(machine, rows)


def test_a_distribution_that_is_another_is_found():
    from gpu_text import LEAST_P, chi_square

    chances = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.05]).double()
    drawn = chances.multinomial(400, True, generator=torch.Generator().manual_seed(0)).bincount(minlength=5).double()
    assert chi_square(drawn, chances) > 0.01
    assert chi_square(drawn.flip(0), chances) < LEAST_P
    assert chi_square(chances * 500, torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05]).double()) < LEAST_P


def test_a_kernel_is_launched_with_the_stages_that_are_asked_for(monkeypatch):
    from gpu_attention import _Staged, knob

    launched = []
    kernel = {(1, 2): lambda *args, **options: launched.append((args, options))}
    _Staged(kernel, 3)[(1, 2)]("q", rows=4, num_stages=2)
    assert launched == [(("q",), {"rows": 4, "num_stages": 3})]
    monkeypatch.setenv("GPU_SPLITS", "8,24")
    assert knob("GPU_SPLITS", "16") == (8, 24) and knob("GPU_STAGES", "2,3") == (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_rehearsed_without_the_packages_that_a_bare_machine_lacks(call, tmp_path):
    command = [sys.executable, str(SCRIPTS / "check_gpu.py"), "--device", "cpu", "--bare", "--call", str(call)]
    run = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{SCRIPTS}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    (kept,) = tmp_path.glob(f"*-call{call}.json")
    told = json.loads(kept.read_text("utf-8"))
    assert {part["state"] for name, part in told.items() if name != "machine"} <= {"done", "skipped"}
    if call == 3:
        assert len(list(tmp_path.glob("trace-*.json.gz"))) == 2
