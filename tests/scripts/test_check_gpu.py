"""scripts/check_gpu.sh: every part at a small size on the CPU, failing parts, and the error without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from offload.errors import Degraded
from offload.sequence import TokenSequence
from offload.speculation.estimators import expected_tokens
from tests.support.paths import SCRIPTS

PARTS = ["tests", "rates", "link", "overlap", "decoding", "resident steps", "quantised linears", "experts"]
PARTS += ["quantised KV", "prefill", "long context", "verification", "retrieval", "triforce"]


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import check_gpu

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", *map(str, arguments)])
        return check_gpu.main()

    run.module = check_gpu
    return run


def of_parts(monkeypatch, check, *parts):
    """Let the check have these parts: functions of its rows."""
    monkeypatch.setattr(check.module, "parts", lambda device: [(part.__name__, 5, part) for part in parts])


def on_a_gpu(monkeypatch, check):
    """Let the check believe that it measures a GPU."""
    facts = {"date": "2026-01-31", "device": "some GPU", "kind": "gpu"}
    monkeypatch.setattr(check.module, "hardware", lambda device: facts)


def test_every_part_runs_on_the_cpu_and_the_table_is_printed_last(check, tmp_path, capsys):
    has_triton = importlib.util.find_spec("triton") is not None
    assert check("--device", "cpu", tmp_path / "results") == 0
    table = capsys.readouterr().out
    kept, written = sorted((tmp_path / "results").iterdir())
    assert written.suffix == ".md" and written.read_text("utf-8") == table
    results = json.loads(kept.read_text("utf-8"))
    assert list(results) == ["machine", *PARTS]
    untold = [part for part in PARTS if results[part]["state"] != "done"]
    assert untold == ([] if has_triton else ["quantised KV"])
    assert results["machine"]["date"] in table and "wanted below 1.15" in table
    methods = results["decoding"]["methods"]
    assert methods["retrieval"]["ids"] == methods["auto"]["ids"] == methods["ar"]["ids"]
    compared = {part: [each["what"] for each in results[part]["comparisons"]] for part in PARTS}
    modes = ("stream", "host", "hybrid")
    assert compared["verification"] == [f"{mode}, {rows} rows" for mode in modes for rows in (1, 8, 22)]
    assert len(compared["quantised linears"]) == 6
    assert not has_triton or compared["quantised KV"] == [
        "q4, streamed, 1 rows",
        "q4, resident, 1 rows",
        "--retrieval-kv q4, 1 rows",
    ]
    assert compared["triforce"] == ["plain decoding", "TriForce", "speed-up"]
    assert compared["experts"] == [f"{way}, {count} rows" for way in ("stream", "host") for count in (1, 8)]
    assert compared["prefill"] == ["prefill"] and len(compared["resident steps"]) == 4
    assert all(
        each["measured"] > 0 and each["predicted"] > 0 for part in PARTS for each in results[part]["comparisons"]
    )


def test_the_parts_take_less_than_ten_minutes(check):
    assert sum(seconds for _, seconds, _ in check.module.parts("cpu")) < 600


def test_experts_on_the_host_that_are_wrong_are_found(check, monkeypatch):
    import gpu_experts
    from gpu_machine import Machine

    from offload.offloading.host_experts import HostExperts

    machine, right = Machine("cpu"), HostExperts.weighted_sum
    monkeypatch.setattr(HostExperts, "weighted_sum", lambda experts, *given: 1.5 * right(experts, *given))
    check.module.attempt("rates", 20, machine.rates)
    result = check.module.attempt("experts", 20, lambda rows: gpu_experts.experts(machine, rows))
    assert result["state"] == "failed" and "experts by host: an error of" in result["rows"][-1][2]
    assert any(row[:2] == ("experts by stream", "as on the device") for row in result["rows"])


def test_a_product_with_quantised_weights_that_is_wrong_is_found(check, monkeypatch):
    import gpu_quantized
    from gpu_machine import Machine

    right = gpu_quantized.QuantizedLinear.wide
    monkeypatch.setattr(gpu_quantized.QuantizedLinear, "wide", lambda linear, x: right(linear, x) * 1.001)
    result = check.module.attempt("quantised", 5, lambda rows: gpu_quantized.quantized_linears(Machine("cpu"), rows))
    assert result["state"] == "failed" and "1 rows: an error of 1.0e-03" in result["rows"][-1][2]


def test_a_part_that_raises_or_times_out_does_not_stop_the_others(check, tmp_path, monkeypatch, capsys):
    def first(rows):
        raise OSError("a loose cable")

    def second(rows):
        rows.append(("so far", "2", ""))
        while True:
            pass

    parts = [("first", 5, first), ("second", 1, second), ("third", 5, lambda rows: rows.append(("x", "1", "")) or {})]
    monkeypatch.setattr(check.module, "parts", lambda device: parts)
    assert check("--device", "cpu", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[:2] == ["| first |  | failed | OSError: a loose cable |", "| second | so far | 2 |  |"]
    assert lines[2:] == ["| second |  | skipped | took longer than 1 s |", "| third | x | 1 |  |"]


@pytest.mark.parametrize(("measured", "code"), [(0.011, 0), (0.0126, 1), (0.0079, 1), (0.0081, 0)])
def test_a_time_beyond_a_quarter_of_its_prediction_fails_on_a_gpu(check, tmp_path, monkeypatch, capsys, measured, code):
    def step(rows):
        rows.compare("a step", measured, 0.01)
        return {}

    of_parts(monkeypatch, check, step)
    assert check("--device", "cpu", tmp_path) == 0  # in miniature, times say nothing
    on_a_gpu(monkeypatch, check)
    assert check("--device", "cpu", tmp_path) == code
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(
        f"| step | a step | {1e3 * measured:.2f} ms | {'**off**: ' if code else ''}predicted 10.00 ms"
    )
    assert line.endswith(f"measured / predicted {measured / 0.01:.2f} |")


@pytest.mark.parametrize(("peak", "code"), [(2**30, 0), (2**30 + 1, 1), (2**20, 0)])
def test_peak_memory_beyond_the_plan_fails_on_a_gpu(check, tmp_path, monkeypatch, peak, code):
    def memory(rows):
        rows.compare_memory("peak memory", peak, 2**30)
        return {}

    of_parts(monkeypatch, check, memory)
    on_a_gpu(monkeypatch, check)
    assert check("--device", "cpu", tmp_path) == code
    (kept,) = tmp_path.glob("*.json")
    assert json.loads(kept.read_text("utf-8"))["memory"]["off"] == ["peak memory"] * code


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_planted_acceptance_is_that_of_many_drafts(check, rate):
    from gpu_triforce import PlantedVerifier

    verifier = PlantedVerifier("full", None, None, rate)
    for drafted in (1, 4, 12):
        accepted = [verifier.accepted(drafted) for _ in range(200)]
        assert min(accepted) >= 0 and max(accepted) <= drafted
        assert sum(accepted) / 200 + 1 == pytest.approx(expected_tokens(rate, drafted), rel=0.02)
        few = sum(verifier.accepted(drafted) for _ in range(5)) / 5 + 1
        assert few == pytest.approx(expected_tokens(rate, drafted), rel=0.2)


def test_a_planted_verdict_accepts_the_first_tokens_of_a_draft_and_refuses_the_next(check):
    from gpu_triforce import PlantedVerifier

    runner = SimpleNamespace(
        rows=lambda sequence, draft: torch.zeros(len(draft) + 1, 7),
        logits=lambda hidden: hidden,
    )
    sampler = SimpleNamespace(distribution=lambda logits, tentative: logits.softmax(-1))
    verifier = PlantedVerifier("full", runner, sampler, 0.5)
    verifier.accepted = lambda drafted: 2
    rows = verifier.score(TokenSequence([3]), [4, 5, 6])
    assert rows.argmax(1).tolist() == [4, 5, 0, 1] and rows.sum() == 4


def test_a_part_says_what_ran_slower_than_it_could(check):
    def part(rows):
        for _ in range(2):
            warnings.warn("steps cannot be recorded", Degraded, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return {}

    assert check.module.attempt("retrieval", 5, part)["rows"] == [("warning", "", "steps cannot be recorded")]


def test_a_long_context_that_was_not_built_skips_what_needs_it(check):
    from gpu_long import LongContext
    from gpu_machine import Machine
    from gpu_rows import Rows

    long = LongContext(Machine("cpu"))
    result = check.module.attempt("verification", 5, long.verification)
    assert result["state"] == "skipped" and "could not be built" in result["rows"][0][2]
    assert check.module.attempt("prefill", 5, lambda rows: Machine("cpu").hardware)["state"] == "skipped"
    assert Rows().off == []


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
