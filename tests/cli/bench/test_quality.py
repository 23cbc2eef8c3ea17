"""`triforce bench --quality` on the tiny model, in this process."""

import json
import os

import pytest
import torch

from offload.errors import SettingsError
from offload.evaluation.needles import NeedleScore
from offload.evaluation.teacher_forcing import TextScores
from offload.session.pool import SessionPool
from tests.support.command import assert_error
from tests.support.offloading import native_kernel
from triforce_cli.bench.compared import EXACT, MODES, parse_modes, settings_of, values_of
from triforce_cli.bench.plot import check_plot, plot
from triforce_cli.bench.quality import ModeQuality, QualityFound
from triforce_cli.bench.report_text import report_text
from triforce_cli.options.settings import option_names, resolve

TEXT = "the cat and the dog and the cat and the dog and " * 12
SMALL = ("--quality", "--context", "160", "--last", "12", "--new", "8", "--needles", "2")
SMALL += ("--budget", "48", "--sink", "4", "--window", "16")


def found_of(triforce_here, *args, text=TEXT):
    answer = triforce_here("bench", text, *SMALL, "--json", *args)
    assert (answer.returncode, answer.stderr) == (0, "")
    return json.loads(answer.stdout)


@pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")
def test_json_has_every_number_of_every_mode(triforce_here):
    found = found_of(triforce_here, "--dtype", "bfloat16")
    assert (found["type"], found["interrupted"]) == ("quality", False) and found["other_load_cores"] >= 0
    assert (found["text_tokens"], found["scored_tokens"], found["new_tokens"]) == (160, 12, 8)
    assert [row["mode"] for row in found["modes"]] == [*MODES]
    exact, *others = found["modes"]
    assert (exact["kl"], exact["top1_agreement"], exact["equal_tokens"]) == (0, 1, 8)
    for row in found["modes"]:
        assert len(row["log_probs"]) == 12 and len(row["output"]) == 8
        mean = sum(row["log_probs"]) / 12
        assert row["perplexity"] == pytest.approx(float(torch.tensor(-mean).exp()), rel=1e-3)
        assert [part["to"] for part in row["perplexity_by_position"]] == [2, 4, 6, 8, 9, 10, 11, 12]
        assert [needle["depth"] for needle in row["needles"]] == [0.75, 0.25]
        assert row["needles_found"] == 0 and row["needle_log_prob"] < 0 and row["needle_log_prob_absent"] < 0
        assert row["token_s"] > 0 and row["prefill_s"] > 0
    divergences = {row["mode"]: row["kl"] for row in others}
    assert min(divergences.values()) > 0
    assert divergences["quantize=q8"] < divergences["quantize=q4"]
    quantized = [row for row in others if row["mode"].startswith("quantize")]
    weights = [row["weights_bytes"] for row in quantized]
    assert weights == sorted(weights, reverse=True) and weights[0] < exact["weights_bytes"]
    assert {row["kv_bytes"] for row in quantized} == {exact["kv_bytes"]}


def test_modes_that_cannot_run_are_left_out_unless_they_are_named(triforce_here):
    found = found_of(triforce_here)  # the tiny model in float32
    left_out = [mode for mode in MODES if mode.startswith("quantize")]
    assert [row["mode"] for row in found["modes"]] == [mode for mode in MODES if mode not in left_out]
    assert list(found["left_out"]) == left_out
    assert_error(triforce_here("bench", TEXT, *SMALL, "--modes", "quantize=q8"), 2, "quantize q8", "float")


def test_a_window_that_is_recomputed(triforce_here):
    found = found_of(triforce_here, "--modes", "recompute,streaming-llm", "--budget", "32")
    exact, recomputed, streaming = found["modes"]
    assert recomputed["mode"] == "recompute" and len(recomputed["output"]) == 8 and recomputed["kl"] > 0
    assert recomputed["log_probs"] != streaming["log_probs"]
    assert recomputed["kv_bytes"] == exact["kv_bytes"] * 32 / 168  # of the window alone; 160 tokens and 8 new ones
    whole = found_of(triforce_here, "--modes", "recompute", "--budget", "200")["modes"]
    assert whole[1]["output"] == whole[0]["output"] and whole[1]["kl"] < 1e-5
    assert whole[1]["needles"] == [
        {**each, "log_prob": pytest.approx(each["log_prob"], abs=1e-3)} for each in whole[0]["needles"]
    ]


def test_a_text_beyond_the_context_is_read_by_modes_that_forget(triforce_here):
    """The tiny model has a context of 2,048 tokens: there is no exact run, and dense attends to all of them."""
    beyond = ("--context", "2100", "--needles", "1", "--modes")
    found = found_of(triforce_here, *beyond, "streaming-llm,dense,recompute", text=6 * TEXT)
    assert [row["mode"] for row in found["modes"]] == ["streaming-llm", "dense", "recompute"]
    assert "2,100 tokens" in found["left_out"][EXACT] and "context of 2,048 tokens" in found["left_out"][EXACT]
    for row in found["modes"]:
        assert (row["kl"], row["top1_agreement"], row["equal_tokens"]) == (None, None, None)
        assert len(row["log_probs"]) == 12 and row["perplexity"] > 1
    streaming, dense, _ = found["modes"]
    assert streaming["log_probs"] != dense["log_probs"] and dense["kv_bytes"] > 3 * streaming["kv_bytes"]
    table = triforce_here("bench", 6 * TEXT, *SMALL, *beyond, "streaming-llm")
    assert (table.returncode, table.stderr) == (0, "") and "left out: exact (the prompt has 2,100" in table.stdout
    for modes in ("exact", "streaming-llm,kv=q8"):
        refused = triforce_here("bench", 6 * TEXT, *SMALL, *beyond, modes)
        assert_error(refused, 2, "2,100 tokens", "context of 2,048", "streaming-llm, h2o, dense, recompute")


def test_dense_within_the_context_is_exact(triforce_here):
    exact, dense = found_of(triforce_here, "--modes", "dense", "--needles", "0")["modes"]
    assert (dense["log_probs"], dense["output"]) == (exact["log_probs"], exact["output"]) and dense["kl"] == 0


def test_the_cache_of_a_recomputed_window_has_no_room_for_the_text(triforce_here, monkeypatch):
    """The plan counts on the window alone, and gives the exact mode room for the text."""
    capacities, new_session = [], SessionPool.new

    def observed(self, capacity, *rest):
        capacities.append(capacity)
        return new_session(self, capacity, *rest)

    monkeypatch.setattr(SessionPool, "new", observed)
    found_of(triforce_here, "--modes", "recompute", "--budget", "32", "--needles", "0")
    assert capacities == [168, 32]


def test_the_table(triforce_here):
    answer = triforce_here("bench", TEXT, *SMALL, "--modes", "exact")
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert "160 tokens · the last 12 scored · greedy" in lines[0]
    (row,) = (line.split() for line in lines if line.startswith("exact"))
    assert row[2:4] == ["0.0000", "100"] and "8 of 8" in " ".join(row) and "0 of 2" in " ".join(row)
    assert "the model itself does not find every needle" in answer.stdout


def test_what_is_refused_before_any_work(triforce_here, tmp_path):
    for args, words in (
        (("--modes", "exact,quantise=q8"), ("'quantise=q8'", "did you mean quantize=q8?")),
        (("--modes", "recompute+h2o"), ("recompute and h2o exclude each other",)),
        (("--modes", "dense+h2o"), ("dense and h2o exclude each other",)),
        (("--last", "160"), ("160 tokens", "--last 160")),
        (("--context", "20", "--last", "4"), ("20 tokens are too few", "--needles 0")),
        (("--methods", "lookup"), ("--methods has no effect with --quality",)),
        (("--temperature", "1"), ("--temperature has no effect",)),
        (("--quantize", "q4"), ("--quantize has no effect",)),
    ):
        assert_error(triforce_here("bench", TEXT, *SMALL, *args), 2, *words)
    assert_error(triforce_here("bench", TEXT, "--needles", "3"), 2, "--needles has no effect without --quality")


def test_every_mode_is_made_of_settings_that_there_are():
    assert {name for values in MODES.values() for name in values} <= option_names()


def test_modes():
    assert parse_modes("quantize=q4, exact,quantize=q4") == (EXACT, "quantize=q4")
    assert values_of("exact+quantize=q4") == {"quantize": "q4"}
    with pytest.raises(SettingsError, match="no mode ''"):
        parse_modes("")
    given = resolve({"model": "a", "quantize": "q5", "seed": 1}, {}, "cpu")
    assert settings_of("quantize=q4", given).engine.quantize == "q4"
    exact = settings_of(EXACT, given)
    assert exact.engine.quantize is None and exact.engine.model == "a"


# Without a model --------------------------------------------------------------------------------------------------

FACTS = {
    "machine": {"name": "A processor with a long name", "threads": 2, "engine": "cpu, bfloat16, avx512 kernel"},
    "model": "smollm2-135m",
    "text_tokens": 1000,
    "scored_tokens": 2,
    "new_tokens": 3,
    "settings": {"top_p": 0.123456},
    "left_out": {"quantize=q8": "no kernel", "quantize=q4": "no kernel"},
}


def quality(mode, log_probs, choices, output, found, divergences=None):
    scores = TextScores(torch.tensor(log_probs), torch.tensor(choices), torch.tensor([0.01, 0.03]), divergences)
    needles = (NeedleScore(None, False, -4.0), NeedleScore(0.75, found, -0.5), NeedleScore(0.25, found, -1.5))
    return ModeQuality(mode, scores, output, needles, 3 * 2**20, 2**20, 1.0)


@pytest.fixture
def report():
    exact = quality(EXACT, [-1.0, -3.0], [5, 6], (1, 2, 3), True)
    other = quality("quantize=q4", [-2.0, -3.0], [5, 7], (1, 9, 3), False, torch.tensor([0.1, 0.3]))
    return QualityFound(FACTS, [exact, other]).report()


def test_rows(report):
    exact, other = report.rows
    assert (exact["perplexity"], other["perplexity"]) == (
        pytest.approx(7.389, abs=1e-3),
        pytest.approx(12.182, abs=1e-3),
    )
    assert (exact["kl"], other["kl"]) == (0, pytest.approx(0.2))
    assert (exact["top1_agreement"], other["top1_agreement"]) == (1, 0.5)
    assert (exact["equal_tokens"], other["equal_tokens"]) == (3, 1)
    assert (exact["needles_found"], other["needles_found"]) == (2, 0)
    assert other["needle_log_prob"] == -1 and other["needle_log_prob_absent"] == -4
    assert report.as_json(True)["modes"][1]["output"] == [1, 9, 3]
    assert report.as_json(True)["settings"] == {"top_p": 0.123456}


@pytest.mark.parametrize("width", [40, 60, 80, 100, None])
def test_the_report_fits_the_terminal(report, width):
    text = report_text(report, width).plain
    assert width is None or max(map(len, text.splitlines())) <= width
    (row,) = (line for line in text.splitlines() if line.startswith("quantize=q4"))
    assert "12.182" in row
    assert ("0.2000" in row) == (width is None or width > 40)
    assert "left out: quantize=q8, quantize=q4 (no kernel)" in " ".join(text.split())


def test_a_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    check_plot(tmp_path / "a.png")
    plot(tmp_path / "a.png", report)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path) == ["a.png"]
