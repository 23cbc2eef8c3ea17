"""scripts/check_gpu.sh: every part at a small size on the CPU, failing parts, and the error without a GPU."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from offload.errors import Degraded
from offload.sequence import TokenSequence
from offload.speculation.passes.estimators import expected_tokens
from tests.support.paths import ROOT, SCRIPTS

PARTS = ["kernel", "tests", "rates", "link", "overlap", "decoding", "resident steps", "pages", "quantised linears"]
PARTS += ["experts", "quantised KV", "prefill", "long context", "verification", "retrieval", "triforce"]


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
    monkeypatch.setattr(check.module, "parts", lambda device, log: [(part.__name__, 5, part) for part in parts])


def on_a_gpu(monkeypatch, check):
    """Let the check believe that it measures a GPU."""
    facts = {"date": "2026-01-31", "device": "some GPU", "kind": "gpu"}
    monkeypatch.setattr(check.module, "hardware", lambda device: facts)


@pytest.mark.long
def test_every_part_runs_on_the_cpu_and_the_table_is_printed_last(check, tmp_path, capsys):
    has_triton = importlib.util.find_spec("triton") is not None
    assert check("--device", "cpu", tmp_path / "results") == 0
    table = capsys.readouterr().out
    tests, kept, lines, written = sorted((tmp_path / "results").iterdir())
    assert "passed" in tests.read_text("utf-8")
    assert written.suffix == ".md" and written.read_text("utf-8") == table
    results = json.loads(kept.read_text("utf-8"))
    assert list(results) == ["machine", *PARTS]
    untold = [part for part in PARTS if results[part]["state"] != "done"]
    assert untold == ([] if has_triton else ["quantised KV"])
    assert results["machine"]["date"] in table and "wanted below 1.15" in table
    methods = results["decoding"]["methods"]
    assert methods["retrieval"]["ids"] == methods["auto"]["ids"] == methods["ar"]["ids"]
    told = [json.loads(line) for line in lines.read_text("utf-8").splitlines()[1:]]
    assert told == [[part, *row] for part in PARTS for row in results[part]["rows"]]
    compared = {part: [each["what"] for each in results[part]["comparisons"]] for part in PARTS}
    modes = ("stream", "host", "hybrid")
    assert compared["verification"] == [f"{mode}, {rows} rows" for mode in modes for rows in (1, 8, 22)]
    assert len(compared["quantised linears"]) == 6
    assert not has_triton or compared["quantised KV"] == [
        "q8, streamed, 1 rows",
        "q8, resident, 1 rows",
    ]
    assert compared["triforce"] == ["plain decoding", "TriForce", "speed-up"]
    assert compared["experts"] == [f"host, {count} rows" for count in (1, 8)]
    assert compared["prefill"] == ["prefill"] and len(compared["resident steps"]) == 4
    assert all(
        each["measured"] > 0 and each["predicted"] > 0 for part in PARTS for each in results[part]["comparisons"]
    )


def test_the_parts_take_less_than_ten_minutes(check):
    assert sum(seconds for _, seconds, _ in check.module.parts("cpu", None)) < 600


def in_a_process(code, *arguments):
    """Run code that has `scripts` on its path."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=SCRIPTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.long
def test_every_part_starts_without_the_packages_that_a_bare_machine_lacks():
    code = """
import gpu_bare, gpu_calls, check_gpu
gpu_bare.hide()
assert all(map(gpu_bare.is_missing, gpu_bare.HIDDEN)) and not any(map(gpu_bare.is_missing, check_gpu.NEEDED))
for name, _, run in check_gpu.parts("cpu", None):
    assert getattr(run, "func", None) is not gpu_calls._raise, (name, run.args)
    print(name)
"""
    run = in_a_process(code)
    assert run.stdout.splitlines() == PARTS and run.returncode == 0, run.stderr


@pytest.mark.long
def test_every_part_runs_without_the_packages_that_a_bare_machine_lacks(tmp_path):
    run = in_a_process("import check_gpu, sys; sys.exit(check_gpu.main())", "--device", "cpu", "--bare", tmp_path)
    assert run.returncode == 0, run.stderr
    assert "| tests |  | skipped | THERE IS NO PYTEST: no test marked cuda was run |" in run.stdout
    assert run.stdout.count("skipped") == 1 + (importlib.util.find_spec("triton") is None)
    assert "| pages | hybrid, 22 rows | error" in run.stdout and "| triforce | speed-up |" in run.stdout


@pytest.mark.parametrize("damage", ["missing", "repeated"])
def test_a_page_that_is_wrong_is_found(check, monkeypatch, damage):
    """Planted faults: the reference was read before them."""
    import gpu_pages
    from gpu_machine import Machine

    read = gpu_pages.same_cache

    def read_and_damage(model, cache):
        copied, pages = read(model, cache), cache.store.tiers.pages
        pages[1, 3] = 0 if damage == "missing" else pages[1, 2]
        return copied

    monkeypatch.setattr(gpu_pages, "same_cache", read_and_damage)
    result = check.module.attempt("pages", 600, lambda rows: gpu_pages.pages(Machine("cpu"), rows))
    assert result["state"] == "failed" and "streamed, 1 rows: an error of" in result["rows"][-1][2]


def test_no_two_pages_of_a_filled_cache_are_alike(check):
    from gpu_models import _fill_pages

    pages = torch.empty(3, 20, 640)
    _fill_pages(pages, torch.float32)
    assert len(pages.flatten(0, 1).unique(dim=0)) == 60
    assert pages.std().item() == pytest.approx(0.5, rel=0.05)


def test_another_output_is_an_error_unless_rounding_explains_it(check):
    from gpu_models import llama, random_model
    from gpu_parts import verdict

    model = random_model(llama(1, 64, 2, 128, 512, 64), torch.float32, torch.device("cpu"))
    ids, plain = [5, 6, 7], []
    for _ in range(3):
        cache = model.new_cache(16)
        hidden = model.forward(torch.tensor([*ids, *plain]), cache)
        plain.append(int(model.logits(hidden[-1:])[0].argmax()))
    assert verdict(model, ids, plain, plain, 1e-3) == "same output"
    other = [*plain[:2], (plain[2] + 1) % 512]
    with pytest.raises(RuntimeError, match="wrong text at token 2"):
        verdict(model, ids, plain, other, 1e-3)
    with pytest.raises(RuntimeError, match="wrong text at token 2"):
        verdict(model, ids, other, plain, 1e-3)  # plain decoding itself is wrong
    assert verdict(model, ids, plain, other, 100.0).startswith("output differs at token 2")
    with pytest.raises(RuntimeError, match="2 tokens where plain decoding has 3"):
        verdict(model, ids, plain, plain[:2], 1e-3)


def test_the_kernel_is_built_by_a_compiler_alone_or_the_reason_is_told(check, monkeypatch, tmp_path):
    import gpu_kernel
    from gpu_rows import Rows

    level = lambda: "avx2" if (tmp_path / "_kernel.abi3.so").exists() else ""  # noqa: E731
    monkeypatch.setattr(gpu_kernel, "_level", level)
    monkeypatch.setattr(gpu_kernel, "is_missing", lambda name: True)
    monkeypatch.setattr(gpu_kernel, "FOLDER", tmp_path)
    (tmp_path / "kernel.c").write_text("int triforce_layout(void) { return 1; }\n")
    found = Rows()
    if shutil.which("gcc"):
        assert gpu_kernel.build_kernel(found) == {"level": "avx2"} and "by compiler" in found[0][2]
        (tmp_path / "_kernel.abi3.so").unlink()
    (tmp_path / "kernel.c").write_text("this is not C\n")
    with pytest.raises(RuntimeError, match="there is no setuptools; "):
        gpu_kernel.build_kernel(found)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.c"]


def test_experts_on_the_host_that_are_wrong_are_found(check, monkeypatch):
    import gpu_experts
    from gpu_machine import Machine

    from offload.weight_offloading.experts import LayerExperts

    machine, right = Machine("cpu"), LayerExperts.weighted_sum
    monkeypatch.setattr(LayerExperts, "weighted_sum", lambda experts, *given: 1.5 * right(experts, *given))
    check.module.attempt("rates", 600, machine.rates)
    result = check.module.attempt("experts", 600, lambda rows: gpu_experts.experts(machine, rows))
    assert result["state"] == "failed" and "experts by host: an error of" in result["rows"][-1][2]


def test_a_product_with_quantised_weights_that_is_wrong_is_found(check, monkeypatch):
    import gpu_quantized
    from gpu_machine import Machine

    right = gpu_quantized.QuantizedLinear.wide
    monkeypatch.setattr(gpu_quantized.QuantizedLinear, "wide", lambda linear, x: right(linear, x) * 1.001)
    result = check.module.attempt("quantised", 600, lambda rows: gpu_quantized.quantized_linears(Machine("cpu"), rows))
    assert result["state"] == "failed" and "1 rows: an error of 1.0e-03" in result["rows"][-1][2]


def test_a_part_that_raises_or_times_out_does_not_stop_the_others(check, tmp_path, monkeypatch, capsys):
    def first(rows):
        raise OSError("a loose cable")

    def second(rows):
        rows.append(("so far", "2", ""))
        while True:
            pass

    parts = [("first", 5, first), ("second", 1, second), ("third", 5, lambda rows: rows.append(("x", "1", "")) or {})]
    monkeypatch.setattr(check.module, "parts", lambda device, log: parts)
    monkeypatch.setitem(check.module.PATIENCE, "cpu", 1)
    assert check("--device", "cpu", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[:2] == ["| first |  | failed | OSError: a loose cable |", "| second | so far | 2 |  |"]
    assert lines[2:] == ["| second |  | failed | took longer than 1 s |", "| third | x | 1 |  |"]


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


def test_a_plantedverdict_accepts_the_first_tokens_of_a_draft_and_refuses_the_next(check):
    from gpu_triforce import PlantedVerifier

    runner = SimpleNamespace(scores=lambda sequence, draft: torch.zeros(len(draft) + 1, 7))
    sampler = SimpleNamespace(distribution=lambda logits, *before: logits.softmax(-1))
    verifier = PlantedVerifier("full", runner, sampler, 0.5)
    verifier.accepted = lambda drafted: 2
    rows = verifier.score(TokenSequence([3]), [4, 5, 6])
    assert rows.argmax(1).tolist() == [4, 5, 0, 1] and rows.sum() == 4


def test_a_part_fails_where_something_ran_slower_than_it_could(check):
    def part(rows):
        for _ in range(2):
            warnings.warn("steps cannot be recorded", Degraded, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return {}

    result = check.module.attempt("retrieval", 600, part)
    assert result["rows"] == [("warning", "slower", "steps cannot be recorded")] and result["state"] == "failed"


def test_a_long_context_that_was_not_built_skips_what_needs_it(check):
    from gpu_long import LongContext
    from gpu_machine import Machine
    from gpu_rows import Rows

    long = LongContext(Machine("cpu"))
    result = check.module.attempt("verification", 600, long.verification)
    assert result["state"] == "skipped" and "could not be built" in result["rows"][0][2]
    assert check.module.attempt("prefill", 600, lambda rows: Machine("cpu").hardware)["state"] == "skipped"
    assert Rows().off == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_an_error_with_a_hint(tmp_path):
    run = subprocess.run(
        [SCRIPTS / "check_gpu.sh", tmp_path / "results"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.startswith("error: no CUDA GPU") and "\nhint: " in run.stderr
    assert not (tmp_path / "results").exists()
