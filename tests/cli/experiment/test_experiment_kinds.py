"""Experiments of other kinds than speed, and of several engines, on the tiny model."""

import json
import re

import pytest

from offload.errors import SettingsError
from triforce_cli.bench.plot import plot
from triforce_cli.bench.quality import _Measurement
from triforce_cli.bench.report import GRID, Measure, Report
from triforce_cli.experiment.definition import Check
from triforce_cli.experiment.outcome import judge_check
from triforce_cli.experiment.shipped import load

HEAD = """
name: tiny
title: A tiny experiment
reproduces: nothing
needs: nothing
shows: that it runs
judged: by a rule
bench: {kind: KIND, methods: METHODS, settings: {context: 90}}
quick:
  kind: KIND
  methods: METHODS
"""
ATTENTION = (
    HEAD.replace("KIND", "attention").replace("METHODS", "[retrieval, streaming]")
    + """  last: 10
  settings: {context: [60, 80], budget: [16, 32], chunk: 4, sink: 4}
judge:
  - {runs: quick, what: more is recovered, measure: recovered, method: streaming, along: budget}
"""
)
HITTERS = (
    HEAD.replace("KIND", "heavy-hitters").replace("METHODS", "[heavy, heavy-but-sink, random]")
    + """  last: 10
  prompts: 2
  settings: {context: 300}
judge:
  - {what: it is measured, measure: masked_perplexity, method: heavy, at_least: 1}
"""
)
QUALITY = (
    HEAD.replace("KIND", "quality").replace("METHODS", "[streaming-llm, recompute]")
    + """  last: 6
  prompts: 2
  settings: {context: 90, max_new_tokens: 2, budget: 32, window: 8, sink: [0, 4]}
judge:
  - {what: it is measured, measure: perplexity, method: exact, at_least: 1}
"""
)
ENGINES = (
    HEAD.replace("KIND", "speed").replace("METHODS", "[retrieval]")
    + """  repeats: 1
  settings: {context: 60, max_new_tokens: 4, temperature: 0, budget: 32, gamma2: 2, resident_layers: 0}
  each: [{offload: stream, link_gb_s: 1.0}, {offload: host, link_gb_s: 1.0}, {offload: stream, link_gb_s: 2.0}]
judge:
  - {what: it accepts, measure: acceptance, method: retrieval, pair: retrieval -> full, at_least: 0}
  - {runs: quick, what: a faster link, measure: tokens_per_s, method: ar, along: link_gb_s, tolerance: 1.0e+9}
"""
)


@pytest.fixture
def run(triforce_here, tmp_path, tiny_model_dir):
    """`run(text, *args)` runs the experiment of this text quickly."""
    (tmp_path / "book.txt").write_text("the cat and the dog and the cat and the dog and " * 20)

    def run(text, *args):
        (tmp_path / "tiny.yaml").write_text(text)
        own = ("--quick", "--model", tiny_model_dir, "-f", tmp_path / "book.txt")
        return triforce_here("experiment", tmp_path / "tiny.yaml", *own, *args)

    return run


def test_attention_by_layer_and_age(run, tmp_path):
    code, out, err = run(ATTENTION, "--json", "--output", tmp_path / "report.md")
    assert code == 0, err
    found = json.loads(out)
    assert (found["type"], found["measured"]["axes"]) == ("experiment", {"context": [60, 80], "budget": [16, 32]})
    rows = {(row["method"], row["context"], row["budget"]): row for row in found["measured"]["points"]}
    assert len(rows) == 12
    for (name, context, budget), row in rows.items():
        assert 0 < row["recovered"] <= rows["ideal", context, budget]["recovered"] + 1e-6 <= 1.000002, name
        assert list(row["recovered_by_age"])[-1] == "10-10" and len(row["recovered_by_layer"]) == 2
    assert [each["holds"] for each in found["verdicts"]] == [True]
    report = (tmp_path / "report.md").read_text()
    assert "by tokens since the selection" in report and "| more is recovered | holds |" in report


def test_heavy_hitters_and_what_masking_them_does(run, tmp_path):
    code, out, err = run(HITTERS, "--json", "--output", tmp_path / "report.md")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["method"]: row for row in found["measured"]["points"]}
    assert list(rows) == ["exact", "heavy", "heavy-but-sink", "random"] and found["measured"]["axes"] == {}
    assert len({row["masked_perplexity"] for row in rows.values()}) == 4
    exact = rows["exact"]
    assert list(exact["received_by_rank"]) == ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
    received = list(exact["received_by_rank"].values())
    assert received == sorted(received, reverse=True)
    assert all(0.05 < share < 1 for share in exact["kept_by_layer"].values()) and len(exact["sparsity_by_layer"]) == 2
    assert exact["map"]["0 0 0"] == 1 and sum(exact["map"][f"1 15 {key}"] for key in range(16)) == pytest.approx(
        1, abs=0.01
    )
    report = (tmp_path / "report.md").read_text()
    assert (
        "5 % of the tokens masked" in report and "by the rank of the token" in report and "query and key" not in report
    )


def test_quality_runs_what_differs_once(run, monkeypatch):
    measure, scored = _Measurement.measure, []
    monkeypatch.setattr(_Measurement, "measure", lambda self, mode: (scored.append(mode.name), measure(self, mode)))
    code, out, err = run(QUALITY)
    assert code == 0, err
    table = out.split("**perplexity by sink**")[1].split("**")[0]
    (exact,) = re.findall(r"^\| exact \| (\S+) .*?\| (\S+) ", table, re.M)
    (streaming,) = re.findall(r"^\| streaming-llm \| (\S+) ±.*?\| (\S+) ±", table, re.M)
    assert exact[0] == exact[1] and streaming[0] != streaming[1]  # with all keys there is no sink
    (window,) = re.findall(r"^\| recompute \| (\S+) ±.*?\| (\S+) ±", table, re.M)
    assert window[0] == window[1] != exact[0]  # nor with a window that is recomputed
    assert "**perplexity by position among the scored tokens**" in out
    assert scored == ["exact", "streaming-llm", "recompute", "streaming-llm"] * 2  # of each excerpt
    assert "| it is measured | holds |" in out


def test_engines_are_compared(run, tmp_path):
    code, out, err = run(ENGINES, "--json", "--points", tmp_path / "runs.jsonl")
    assert code == 0, err
    found = json.loads(out)["measured"]
    assert found["axes"] == {"offload": ["stream", "host"], "link_gb_s": [1, 2]}
    engines = [("stream", 1), ("host", 1), ("stream", 2)]
    assert [(row["offload"], row["link_gb_s"]) for row in found["points"]] == [each for each in engines for _ in "12"]
    assert all(row["equals_ar"] for row in found["points"] if row["method"] == "retrieval")
    code, _, err = run(ENGINES, "--offload", "host")
    assert code == 2 and "--offload is varied by tiny" in err


def test_points_are_for_speed(run, tmp_path):
    code, out, err = run(QUALITY, "--points", tmp_path / "runs.jsonl")
    assert (code, out) == (2, "") and "--points keeps runs" in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind: attention", "kind: looks", "kind is 'looks'"),
        ("[retrieval, streaming]", "[retrieval, ar]", "there is no selection 'ar'"),
        ("kind: attention", "kind: heavy-hitters", "no tokens are masked as 'retrieval'"),
        ("context: [60, 80], ", "", "settings.context is missing"),
        ("budget: [16, 32]", "batch: 2, budget: [16, 32]", "settings.batch is"),
        ("last: 10", "each: [{offload: host}]", "each is"),
        ("last: 10", "last: 0", "last is 0"),
        ("measure: recovered", "measure: perplexity", "quick does not measure perplexity"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path, old, new, words):
    head, _, quick = ATTENTION.partition("quick:")
    (tmp_path / "tiny.yaml").write_text(head + "quick:" + quick.replace(old, new))
    with pytest.raises(SettingsError) as raised:
        load(str(tmp_path / "tiny.yaml"))
    assert words in f"{raised.value.message} {raised.value.hint}", raised.value.message


def test_rules_follow_one_setting_and_skip_profiles():
    rows = [
        {"method": "exact", "sink": None, "budget": None, "perplexity": 9.0, "perplexity_sd": None, "by": {"1": 2.0}},
        *(
            {"method": "m", "sink": sink, "budget": 64, "perplexity": value, "perplexity_sd": None, "by": {"1": value}}
            for sink, value in ((0, 30.0), (4, 11.0))
        ),
    ]
    check = Check("w", "perplexity", "m", along="sink", direction="falls")
    assert judge_check(check, rows).holds and re.match("30 → 11", judge_check(check, rows).numbers)


def test_profiles_have_charts_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    facts = {"machine": {"name": "m", "threads": 1, "engine": "cpu"}, "model": "m", "new_tokens": None, "repeats": 1}
    facts |= {"settings": {"temperature": 0.0}, "prompts": [{"name": "a", "tokens": 9}]}
    rows = [
        {"method": "h2o", "budget": size, "recovered": 0.5, "recovered_sd": None, "by": {"0": 0.3}} for size in (8, 16)
    ]
    shown, by_layer = Measure("recovered", "recovered", str), Measure("by", "recovered by layer", str)
    plot(tmp_path / "a.png", Report(GRID, facts, rows, {"budget": (8, 16)}, [shown], [by_layer]))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


DRAFTERS = (
    HEAD.replace("KIND", "drafters").replace("METHODS", "[lookup]")
    + """  settings: {context: [40, 80], max_new_tokens: 8, temperature: 0}
judge:
  - {what: lookup emits tokens, measure: tokens_per_verification, method: lookup, at_least: 1}
"""
)


def test_drafters_side_by_side(run, tiny_model_dir):
    code, out, err = run(DRAFTERS, "--draft", f"lookup,{tiny_model_dir}", "--json")
    assert code == 0, err
    found = json.loads(out)["measured"]
    rows = {(row["method"], row["context"]): row for row in found["points"]}
    assert list(rows) == [(name, context) for name in ("ar", "lookup", str(tiny_model_dir)) for context in (40, 80)]
    for (name, _), row in rows.items():
        assert row["tbt_ms"] > 0 and row["memory_mib"] > 0
        assert (row["speedup"] == 1) == (name == "ar")
    own = rows[str(tiny_model_dir), 80]  # the model itself: greedy, all that it drafts is accepted
    assert own["acceptance_by_depth"] == {str(depth): 1 for depth in range(1, 5)}
    assert own["tokens_per_verification"] > 1 and own["draft_ms"] > 0
    assert own["memory_mib"] > rows["ar", 80]["memory_mib"]


def test_drafters_without_a_name(run):
    for names in (",", "lookup,,self"):
        code, _, err = run(DRAFTERS, "--draft", names)
        assert code == 2 and "one of the drafters has no name" in err
