"""scripts/experiment_charts.py: the lines that it draws are the numbers of the run, on axes that hold them."""

import importlib.util
import json
import sys

import pytest

from tests.support.paths import ROOT, SCRIPTS
from triforce_cli.experiment.shipped import load


@pytest.fixture(scope="module")
def charts():
    sys.path.insert(0, str(SCRIPTS))  # the script imports its neighbours
    try:
        spec = importlib.util.spec_from_file_location("experiment_charts", SCRIPTS / "experiment_charts.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["experiment_charts"] = module  # dataclasses read it
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))
        sys.modules.pop("experiment_charts", None)


def chart_of(charts, name):
    return next(each for each in charts.CHARTS if each.experiment == name)


def accepted(method, value, pairs):
    return {"method": method, "budget": value, "acceptance": pairs}


def test_acceptance_is_that_by_the_full_cache(charts):
    rows = [
        {"method": "ar", "budget": None, "acceptance": {}},
        accepted("streaming:none", 64, {"streaming -> full": 0.7}),
        accepted("triforce", 64, {"lookup -> retrieval": 0.2, "retrieval -> full": 0.9}),
        accepted("triforce", 256, {"lookup -> retrieval": 0.3, "retrieval -> full": 0.95}),
    ]
    lines = chart_of(charts, "budget").lines([row | {"draft": "lookup"} for row in rows])
    assert lines == {"streaming": [("64", 0.7)], "triforce, draft: lookup": [("64", 0.9), ("256", 0.95)]}


def test_perplexity_is_of_the_smaller_cache_and_by_the_end_of_each_part(charts):
    def row(method, sink, budget, value):
        parts = {"0-40": value, "40-80": value + 1}
        return {"method": method, "sink": sink, "budget": budget, "perplexity_by_position": parts}

    rows = [row("exact", None, None, 9), row("streaming-llm", 0, 64, 80), row("streaming-llm", 2, 64, 12)]
    rows += [row("streaming-llm", 4, 64, 10), row("streaming-llm", 4, 128, 9), row("recompute", None, 64, 11)]
    lines = chart_of(charts, "streaming-llm").lines(rows)
    assert list(lines) == ["exact (dense)", "window attention", "StreamingLLM, sink 4", "recomputed window"]
    assert lines["window attention"] == [("40", 80), ("80", 81)]


def test_positions_beyond_the_context_are_those_in_the_text(charts):
    parts = [{"from": 0, "to": 50, "perplexity": 9.0}, {"from": 50, "to": 100, "perplexity": 90.0}]
    rows = [{"mode": mode, "first": 1_000, "perplexity_by_position": parts} for mode in ("streaming-llm", "dense")]
    points = [("1,050", 9.0), ("1,100", 90.0)]
    assert charts._from_text_start(rows) == {"StreamingLLM": points, "dense attention": points}


def test_layers_are_those_of_the_largest_budget_and_depths_those_of_the_longest_text(charts):
    rows = [{"method": "ideal", "budget": size, "recovered_by_layer": {"0": size / 512}} for size in (64, 256)]
    assert chart_of(charts, "attention").lines(rows) == {"ideal": [("0", 0.5)]}
    rows = [
        {"method": "exact", "context": size, "needle_by_depth": {"0.25": -1.0, "0.75": -size}} for size in (400, 800)
    ]
    assert chart_of(charts, "needles").lines(rows) == {"exact": [("0.25", -1.0), ("0.75", -800)]}


def test_heavy_hitters_are_drawn_from_the_exact_model_s_row(charts):
    row = {
        "method": "exact",
        "kept_by_layer": {"0": 0.3},
        "sparsity_by_layer": {"0": 0.2},
        "received_by_rank": {"1": 9},
    }
    lines = [each.lines([row]) for each in charts.CHARTS if each.experiment == "heavy-hitters"]
    assert lines[0] == {"on 5 % of the tokens": [("0", 0.3)], "with under 1 % of the largest": [("0", 0.2)]}
    assert lines[1] == {"attention received": [("1", 9)]}
    assert "104.0" in charts.masked().svg() and "layer 29" in charts.sink_map().svg()


@pytest.mark.parametrize(
    ("name", "values", "ticks"),
    [
        ("budget", [0.62, 0.9], [0.6, 0.7, 0.8, 0.9]),
        ("budget", [1.0, 1.0], [0.9, 1.0]),
        ("budget", [0.7, 0.9], [0.7, 0.8, 0.9]),
        ("needles", [-7.3, -0.2], [-8, -6, -4, -2, 0]),
        ("streaming-llm", [23, 480], [20, 50, 100, 200, 500]),
        ("streaming-llm", [20, 1000], [20, 50, 100, 200, 500, 1000]),
    ],
)
def test_ticks_hold_all_values(charts, name, values, ticks):
    assert charts._ticks(chart_of(charts, name), values) == pytest.approx(ticks)


def test_every_chart_is_of_a_quick_run_of_the_experiment_as_it_is_and_in_the_documentation(charts):
    text = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    for chart in charts.CHARTS:
        assert f"(images/{chart.picture}.svg)" in text
        found, quick = charts.newest(f"*-experiment-{chart.experiment}-*.json"), load(chart.experiment).quick
        assert (found["name"], found["quick"], found["interrupted"]) == (chart.experiment, True, False)
        assert found["measured"]["model"] == quick.model
        assert found["measured"]["axes"] == json.loads(json.dumps(dict(quick.values)))
        assert set(quick.methods) <= {row["method"] for row in found["measured"]["points"]}
