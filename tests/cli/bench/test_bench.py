"""`triforce bench` on the tiny model, in this process; its table and its comparisons without a model."""

import json
import re

import pytest

from offload.errors import SettingsError
from offload.metrics import Meter
from offload.settings.config import Speculation
from tests.support.command import assert_error
from tests.support.offloading import native_kernel
from triforce_cli.bench.methods import MODES, parse_methods, parse_modes, speculations
from triforce_cli.bench.report import Cell, Report, Run, report_text

TEXT = "the cat and the dog and the cat and the dog and " * 8
SMALL = ("--context", "100", "--new", "16", "--repeats", "2", "--budget", "64", "--temperature", "0")
QUALITY = ("--quality", "--context", "240", "--last", "12", "--budget", "48", "--set", "sink=4", "--set", "window=16")


def rows_of(triforce_here, *args):
    answer = triforce_here("bench", TEXT, *args, "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    return json.loads(answer.stdout)


def test_json_has_every_method_with_its_runs(triforce_here, tiny_model_dir):
    found = rows_of(triforce_here, *SMALL, "--draft", tiny_model_dir)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["ar", "auto", "lookup", "naive", "retrieval", "streaming", "triforce"]
    assert (found["type"], found["new_tokens"], found["repeats"], found["interrupted"]) == ("bench", 16, 2, False)
    assert found["machine"]["threads"] >= 1 and found["settings"]["budget"] == 64
    plain = rows["ar"]
    assert plain["speedup"] == 1 and plain["acceptance"] == {} and plain["tokens_per_verification"] == 1
    for row in rows.values():
        assert len(row["runs"]) == 2 and len(row["tokens"]) == 16  # no end-of-sequence token has ended it
        assert row["ttft_s"] > 0 and (row["differs_at"] is None or row["lossless"])
        assert (row["memory_bytes"] > plain["memory_bytes"]) == (row["method"] not in ("ar", "lookup"))
    assert rows["lookup"]["tokens_per_verification"] > 1 and rows["naive"]["acceptance"] == {"draft -> full": 1.0}


def test_contexts_and_temperatures_are_lists(triforce_here):
    args = ("--context", "120,60", "--temperature", "0,0.8", "--seed", "1", "--methods", "lookup", "--new", "8")
    found = rows_of(triforce_here, *args, "--repeats", "1")
    cells = [(row["context"], row["temperature"], row["method"]) for row in found["rows"]]
    assert cells == [(n, t, name) for n in (60, 120) for t in (0, 0.8) for name in ("ar", "lookup")]
    assert all(row["differs_at"] is None or row["lossless"] for row in found["rows"])
    texts = {(row["context"], row["temperature"]): row["tokens"] for row in found["rows"]}
    assert texts[60, 0] != texts[60, 0.8]
    alone = rows_of(triforce_here, "--context", "120", *args[2:], "--repeats", "1")  # a prompt of its own
    assert [row["tokens"] for row in alone["rows"]] == [row["tokens"] for row in found["rows"][4:]]


@pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")
def test_quality_has_every_mode_beside_the_exact_one(triforce_here):
    found = rows_of(triforce_here, *QUALITY, "--dtype", "bfloat16")
    assert (found["type"], found["text_tokens"], found["scored_tokens"]) == ("quality", 240, 12)
    assert [row["mode"] for row in found["modes"]] == [*MODES]
    exact, *others = found["modes"]
    assert (exact["kl"], exact["top1_agreement"]) == (None, None) and len(exact["log_probs"]) == 12
    assert min(row["kl"] for row in others) > 0
    rounded = {row["mode"]: row for row in others if row["mode"].startswith("quantize")}
    assert rounded["quantize=q8"]["kl"] < rounded["quantize=q4"]["kl"]
    assert rounded["quantize=q4"]["weights_bytes"] < rounded["quantize=q8"]["weights_bytes"] < exact["weights_bytes"]


def test_quality_leaves_out_what_cannot_run_unless_it_is_named(triforce_here):
    found = rows_of(triforce_here, *QUALITY)  # the tiny model in float32
    assert {mode for mode in MODES if mode.startswith("quantize")} <= set(found["left_out"])
    assert_error(triforce_here("bench", TEXT, *QUALITY, "--modes", "quantize=q8"), 2, "quantize q8", "float")
    table = triforce_here("bench", TEXT, *QUALITY, "--modes", "h2o").stdout
    assert [line.split()[0] for line in table.splitlines()[-2:]] == ["exact", "h2o"] and "last 12 of 240" in table


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--context", "5000"), ("fewer than --context 5,000", "--context ")),
        (("--context", "1K,x"), ("--context is '1K,x'", "several with commas")),
        (("--new", "3000"), ("2,048", "--max-new-tokens")),
        (("--methods", "ar,lokup"), ("'lokup'", "did you mean lookup?")),
        (("--methods", "lookup:seed=1"), ("seed cannot be its own setting",)),
        (("--methods", "lookup:middle=streaming"), ("middle level",)),
        (("--methods", "naive"), ("draft model",)),
        (("--temperature", "hot"), ("--temperature is 'hot'", "several with commas")),
        (("--last", "9"), ("--last has no effect without --quality",)),
        (("--quality", "--methods", "ar"), ("--methods has no effect with --quality",)),
        (("--quality", "--context", "10,20"), ("--context is a list",)),
        (("--quality", "--modes", "kv=q7"), ("no mode 'kv=q7'", "did you mean kv=q8?")),
        (("--quality", "--last", "900"), ("leaves none before",)),
        (("--ladder", "4K"), ("--ladder was removed", "--context 4K,8K")),
    ],
)
def test_what_is_refused_before_any_work(triforce_here, args, words):
    assert_error(triforce_here("bench", TEXT, *args), 2, *words)


def run_of(seconds, tokens=(1, 2, 3), differs_at=None, lossless=None):
    """Return a run of three tokens, one after `seconds` each."""
    now = iter([0.0, *(seconds * n for n in range(1, 9))])
    meter = Meter(10, lambda: next(now))
    summary = meter.summary("length")
    fields = {"tokens_per_s": 1 / seconds, "tbt_median_s": seconds, "tokens_per_verification": 1.0}
    for name, value in fields.items():
        object.__setattr__(summary, name, value)
    return Run(summary, list(tokens), 1.5, 9.0, 2**20, differs_at, lossless, None)


def report_of(**runs):
    machine = {"name": "A processor with a long name", "threads": 2, "engine": "cpu, bfloat16, avx512 kernel"}
    facts = {"machine": machine, "model": "smollm2-135m", "new_tokens": 128, "repeats": 2, "settings": {}}
    return Report(facts, {Cell(1000, 0.0, method): each for method, each in runs.items()})


def test_speedups_are_those_of_the_same_round():
    report = report_of(ar=[run_of(0.1), run_of(0.05)], lookup=[run_of(0.05), run_of(0.05, (1, 5, 3), 1, True)])
    plain, fast = report.rows()
    assert (plain["speedup"], plain["differs_at"]) == (1, None)
    assert (fast["speedup"], fast["speedups"]) == (1.5, [2, 1])
    assert (fast["differs_at"], fast["lossless"]) == (1, True)
    text = report_text(report, None).plain
    assert "1.50x (1.00-2.00)" in text and "differs at token 1 (a tie)" in text
    assert "the runs of one method differ by up to 67%" in text and "other processes" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_fits_the_terminal(width):
    report = report_of(ar=[run_of(0.05)], triforce=[run_of(0.02)])
    text = report_text(report, width).plain
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"triforce .*50\.00 +2\.50x", text)


def test_methods_may_have_settings_of_their_own():
    names = parse_methods("triforce:draft=none:middle=streaming:tree=k-ary:2x2, lookup:tree=16,retrieval:budget=256")
    found = speculations(names, Speculation(draft="a-model", tree="8"))
    assert [(each.method, each.draft, each.middle, each.tree, each.budget) for each in found.values()] == [
        ("ar", "a-model", None, "8", None),
        ("triforce", "none", "streaming", "k-ary:2x2", None),
        ("lookup", "a-model", None, "16", None),
        ("retrieval", "a-model", None, "8", 256),
    ]
    assert "naive" not in speculations(None, Speculation()) and "naive" in speculations(None, Speculation("auto", "m"))
    assert parse_modes("h2o, h2o") == ("exact", "h2o")
    with pytest.raises(SettingsError, match="'bush'"):
        speculations(("lookup:tree=bush",), Speculation())
