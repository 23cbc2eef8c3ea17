"""`triforce bench` over lists of settings and several prompts, on the tiny model in this process."""

import csv
import json
import shlex
import shutil
from types import SimpleNamespace

import pytest

from offload.errors import PromptError, SettingsError
from triforce_cli.bench import measure
from triforce_cli.bench.axes import Values, parse_context, parse_list, points
from triforce_cli.bench.benchmark import note_grouped
from triforce_cli.bench.cells import Cell, identity
from triforce_cli.bench.plot import charts, plot, series
from triforce_cli.bench.prompts import first_tokens
from triforce_cli.bench.report import GRID as KIND
from triforce_cli.bench.report import Report, csv_text, pivots
from triforce_cli.bench.report_text import notes
from triforce_cli.bench.rows import Finished

TEXT = "the cat and the dog and the cat and the dog and " * 8
SMALL = ("--new", "6", "--repeats", "1", "--temperature", "0", "--methods", "lookup", "--gamma2", "2")
GRID = (TEXT, *SMALL, "--context", "40,60", "--new", "4,6")
SAMPLED = ("temperature", "top_p", "top_k", "repetition_penalty")
TIMES = ("ttft_s", "tokens_per_s", "tbt_median_s", "tbt_p95_s", "time_share", "total_s", "date", "other_load_cores")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(lines):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def test_lists_are_parsed():
    assert parse_list("0, 0.6,1,0.6", float, "temperature") == Values((0.0, 0.6, 1.0))
    assert parse_list("512", int, "budget") == parse_list("512,512", int, "budget") == 512
    assert parse_context("2K,8000") == Values((2048, 8000)) and parse_context("500, 700") == Values((500, 700))
    assert parse_context("8,192") == 8192 and parse_context("1,048,576") == 2**20
    assert parse_list("512,128", int, "budget") == Values(
        (512, 128)
    )  # as wide as one number, and no other way to write
    for text in ("1,024", "16,008", "1,024,128"):
        with pytest.raises(SettingsError, match="no list of numbers") as refused:
            parse_list(text, int, "budget")
        assert f"write {text.replace(',', '')};" in refused.value.hint
    with pytest.raises(SettingsError):
        parse_context("0,512")
    with pytest.raises(PromptError) as short:
        first_tokens([1, 2], parse_context("200,300"))
    assert short.value.hint.endswith('; for two contexts: --context "200, 300"')
    notes = []
    for text in ("8192", "200,300"):
        note_grouped(parse_context(text), SimpleNamespace(note=notes.append))
    assert notes == ['--context 200,300 is one number; for two contexts: --context "200, 300"']
    with pytest.raises(PromptError) as short:
        first_tokens([1, 2], parse_context("8K"))
    assert "contexts" not in short.value.hint
    for text, parse in (("1,,2", int), ("1,x", int), ("", float), ("0.5,", float)):
        with pytest.raises(SettingsError, match="is not a"):
            parse_list(text, parse, "budget")
    assert points({"budget": (1, 2), "chunk": (3,)}) == [{"budget": 1, "chunk": 3}, {"budget": 2, "chunk": 3}]
    with pytest.raises(SettingsError, match="10,201 combinations"):
        points({"budget": range(101), "chunk": range(101)})


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("300, 600", "300, 600"),  # without the space it is one number
        ("1,  024, 128K", "1,24,131072"),
        ("2K,600", "2048,600"),
        ("64, 128", "64, 128"),
        ("600 , 300, 100", "600, 300, 100"),
        ("1, 200", "1, 200"),
    ],
)
def test_printed_contexts_read_back_as_what_was_given(given, printed):
    found = parse_context(given)
    assert str(found) == printed and parse_context(printed) == found


@pytest.mark.parametrize(
    ("text", "parse", "printed"),
    [
        ("64,128", int, "64,128"),
        ("0, 0.6,1.0", float, "0,0.6,1"),
        ("0.12345678,1e-7", float, "0.12345678,1e-07"),
        ("4,k-ary:2x2", str, "4,k-ary:2x2"),
    ],
)
def test_printed_lists_read_back_as_what_was_given(text, parse, printed):
    found = parse_list(text, parse, "x")
    assert str(found) == printed and parse_list(printed, parse, "x") == found


def test_bad_lists_are_refused_before_any_work(triforce_here, tmp_path):
    own, linked = tmp_path / "own.csv", tmp_path / "linked.csv"
    own.write_text(TEXT)
    linked.symlink_to(own)
    for args, words in (
        (("--temperature", "0,warm"), "'warm' is not a number"),
        (("--budget", "64,128", "--chunk", "8,32"), "budget is 64, with chunks of 32"),
        (("--budget", "64,128", "--quality"), "--budget 64,128 is a list"),
        (("--context", "300, 600", "--quality"), "--context 300, 600 is a list"),
        (("--prompts", "2"), "needs their length"),
        (("--each-file",), "--each-file takes its prompts from --prompt-file"),
        (("--context", "40,5000"), "fewer than --context 5,000"),
        (("--context", "200,300", "--budget", "64,128"), 'for two contexts: --context "200, 300"'),
        (("--csv", tmp_path / "none" / "a.csv"), "there is no folder"),
        (("--csv", "/dev/null"), "/dev/null is no regular file"),
        (("--csv", own, "--points", tmp_path / "." / "own.csv"), "own.csv are the same file"),
        (("-f", own, "--csv", own), f"--prompt-file {own} and --csv {own} are the same file"),
        (("-f", own, "--points", linked), f"--prompt-file {own} and --points {linked} are the same file"),
    ):
        code, out, err = triforce_here("bench", TEXT, "--new", "4", *args)
        assert (code, out, len(err.splitlines())) == (2, "", 2), err
        assert words in err
    assert own.read_text() == TEXT
    other = tmp_path / "other.jsonl"
    other.write_text('{"type": "result"}\n')
    code, out, err = triforce_here("bench", *GRID, "--points", other)
    assert (code, out) == (2, "") and "line 1 is no run of a benchmark" in err
    assert other.read_text() == '{"type": "result"}\n'


def test_the_command_of_a_dry_run_keeps_the_lists(triforce_here):
    lists = ("--budget", "64,128", "--chunk", "8,16", "--gamma1", "3,4", "--gamma2", "2,5", "--tree", "4,k-ary:2x2")
    more = ("--new", "4", "--methods", "triforce", "--context", "1,000", "--dry-run")
    code, out, err = triforce_here("bench", TEXT * 4, *more, *lists)
    assert code == 0 and "--context 1,000 is one number" in err, err
    words = shlex.split(out.splitlines()[-1])
    given = {name: words[words.index(name) + 1] for name in lists[::2]}
    assert given == dict(zip(lists[::2], lists[1::2], strict=True)) and words.count("--budget") == 1


def test_the_command_of_a_dry_run_means_the_same_contexts(triforce_here):
    args = (TEXT * 8, "--methods", "lookup", "--new", "4", "--context", "300, 600", "--dry-run")
    for _ in range(2):
        code, out, err = triforce_here("bench", *args)
        words = shlex.split(out.splitlines()[-1])
        assert (code, err) == (0, "") and words[words.index("--context") + 1] == "300, 600"
        args = (*words[2:], "--dry-run")


def test_the_sampling_of_trees_is_a_list_that_only_drawn_trees_read(triforce_here, tmp_path):
    methods = ("streaming:none", "streaming:none:tree=k-ary:3x2", "lookup:tree=4")
    args = (TEXT, "--new", "6", "--repeats", "1", "--temperature", "1", "--budget", "32", "--chunk", "8", "--sink", "4")
    args += ("--methods", ",".join(methods), "--tree-sampling", "without-replacement,with-replacement")
    code, out, err = triforce_here("bench", *args, "--points", tmp_path / "runs.jsonl", "--json")
    assert code == 0, err
    found = [(row["method"], row["tree_sampling"]) for row in json.loads(out)["points"]]
    drawn = [(methods[1], each) for each in ("without-replacement", "with-replacement")]
    assert found == [("ar", None), (methods[0], None), drawn[0], (methods[2], None), drawn[1]]
    kept = {line["method"]: line["settings"].get("tree_sampling") for line in lines_of(tmp_path / "runs.jsonl")}
    assert kept == {"ar": None, methods[0]: None, methods[1]: "with-replacement", methods[2]: None}
    refused = triforce_here("bench", TEXT, "--methods", "lookup:tree=4", "--tree-sampling", "top-k,none")
    assert refused[0] == 2 and "tree-sampling is 'none'" in refused[2]


def test_an_interrupted_grid_goes_on_where_it_ended(triforce_here, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert triforce_here("bench", *GRID, "--points", whole).returncode == 0
    assert len(lines_of(whole)) == 8  # two contexts, two lengths, ar and lookup
    run_once, done = measure.run_once, []

    def interrupted(*args):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(args)
        return run_once(*args)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "run_once", interrupted)
        code, out, err = triforce_here("bench", *GRID, "--points", cut)
    assert code == 130 and "tokens/s by new" in out and len(lines_of(cut)) == 3
    assert "interrupted; 3 of 8 runs saved: run the same command again to go on" in err
    before = cut.read_bytes()
    cut.write_bytes(before + b'{"type": "bench_run", "prompt')
    code, out, err = triforce_here("bench", *GRID, "--points", cut, "--json")
    assert code == 0 and "the last line was cut" in err
    assert cut.read_bytes().startswith(before)
    assert untimed(lines_of(cut)) == untimed(lines_of(whole))
    assert not {"tbt_s", "nodes", "seconds"} & lines_of(cut)[0].keys()  # of the report of one prompt
    first = json.loads(out)
    with monkeypatch.context() as patch:
        patch.setattr("offload.api.loader.OpenModel.load", None)  # everything is finished
        again = json.loads(triforce_here("bench", *GRID, "--points", cut, "--json").stdout)
        uninterrupted = json.loads(triforce_here("bench", *GRID, "--points", whole, "--json").stdout)
    assert again["points"] == first["points"]
    assert first["axes"] == {"context": [40, 60], "max_new_tokens": [4, 6]}
    same = ("method", "context", "max_new_tokens", "prompts", "repeats", "acceptance", "equals_ar")
    assert [[row[name] for name in same] for row in first["points"]] == [
        [row[name] for name in same] for row in uninterrupted["points"]
    ]
    assert all(row["equals_ar"] for row in first["points"])
    old = [{name: each for name, each in line.items() if name != "accepted_of_drafted"} for line in lines_of(whole)]
    whole.write_text("".join(f"{json.dumps(line)}\n" for line in old))
    with monkeypatch.context() as patch:
        patch.setattr("offload.api.loader.OpenModel.load", None)  # what earlier versions measured counts, too
        found = json.loads(triforce_here("bench", *GRID, "--points", whole, "--json").stdout)["points"]
    assert [row | {"accepted_of_drafted": {}, "accepted_of_drafted_sd": {}} for row in uninterrupted["points"]] == found


def test_other_settings_are_other_points(triforce_here, tmp_path):
    """Plain decoding reads no budget: it runs once for all; another seed or text is measured anew."""
    file, one = tmp_path / "runs.jsonl", (TEXT, *SMALL, "--context", "60", "--points", tmp_path / "runs.jsonl")
    assert triforce_here("bench", *one, "--methods", "retrieval", "--budget", "32,48").returncode == 0
    assert [line["method"] for line in lines_of(file)] == ["ar", "retrieval", "retrieval"]
    assert triforce_here("bench", *one, "--methods", "retrieval", "--budget", "48,64").returncode == 0
    assert [line["settings"].get("budget") for line in lines_of(file)] == [None, 32, 48, 64]
    assert triforce_here("bench", *one, "--seed", "5", "--methods", "ar").returncode == 0
    assert len(lines_of(file)) == 5
    placed = ("--methods", "ar", "--offload", "stream", "--link", "9", "--resident-layers")
    for layers in (0, 1):
        assert triforce_here("bench", *one, *placed, layers).returncode == 0
    assert [line["settings"]["tiers"]["resident_layers"] for line in lines_of(file)[5:]] == [0, 1]
    assert {line["settings"]["context"] for line in lines_of(file)} == {2048}


def test_temperatures_differ_in_nothing_else(triforce_here, tmp_path, tiny_model_dir):
    model, file = tmp_path / "model", tmp_path / "runs.jsonl"
    shutil.copytree(tiny_model_dir, model)
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 7, "repetition_penalty": 1.3}')
    args = ("--new", "2", "--repeats", "1", "--methods", "ar", "--model", model, "--points", file, "--json")
    code, out, err = triforce_here("bench", TEXT, *args, "--temperature", "0,0.8", "--top-p", "0.7")
    assert code == 0 and err.count("in place of the model's own sampling") == 1, err
    kept = [[line["settings"][name] for name in SAMPLED] for line in lines_of(file)]
    assert kept == [[0, 0.7, 0, 1], [0.8, 0.7, 0, 1]]
    assert [json.loads(out)["settings"][name] for name in SAMPLED] == [None, 0.7, 0, 1]
    code, out, err = triforce_here("bench", TEXT, *args, "--temperature", "0.8", "--top-p", "0.5,0.7")
    assert (code, "place of" in err) == (0, False)
    assert [json.loads(out)["settings"][name] for name in SAMPLED] == [0.8, None, 7, 1.3]  # the model's own


def test_several_prompts(triforce_here, tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, (TEXT, "a bird in the hand is worth two in the bush, " * 8), strict=True):
        file.write_text(text)
    named = ("-f", files[0], "-f", files[1], "--context", "200", *SMALL)
    answer = triforce_here("bench", *named, "--each-file", "--csv", tmp_path / "grid.csv", "--json", "--cache")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["prompts"] == [{"name": "a.txt", "tokens": 200}, {"name": "b.txt", "tokens": 200}]
    assert [(row["method"], row["prompts"]) for row in found["points"]] == [("ar", 2), ("lookup", 2)]
    assert all(row["tokens_per_s_sd"] is not None for row in found["points"])
    kept = list((tmp_path / "home" / "prompts").rglob("*.safetensors"))
    assert len(kept) == 2  # of each prompt a block of 128 tokens
    assert (tmp_path / "grid.csv").stat().st_mode == files[0].stat().st_mode
    with (tmp_path / "grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["ar", "lookup"] and float(rows[1]["speedup"]) > 0
    answer = triforce_here("bench", *named, "--prompts", "3", "--json")
    assert [each["name"] for each in json.loads(answer.stdout)["prompts"]] == [f"prompt {n}/3" for n in (1, 2, 3)]


# Without a model --------------------------------------------------------------------------------------------------


def record(rate, acceptance=None, tokens=(1, 2), **more):
    kept = {"tokens_per_s": rate, "tbt_median_s": 1 / rate, "tokens_per_verification": 1.0, "lossless": None}
    kept |= {"tokens": list(tokens), "sampling": "greedy", "other_load_cores": 0.5}
    rates = acceptance or {}
    return kept | {"acceptance": rates, "accepted_of_drafted": {pair: rate / 2 for pair, rate in rates.items()}} | more


FACTS = {"machine": {"name": "m", "threads": 1, "engine": "cpu"}, "model": "m", "new_tokens": 2, "repeats": 2}
FACTS |= {"settings": {"temperature": 0.0}, "prompts": [{"name": "a", "tokens": 9}] * 2}


def report_of(axes, cells, base, records):
    return Report(KIND, FACTS, Finished(cells, base, records).points(axes), axes, other_load=0.5)


def grid_report(**more):
    """Two prompts and two budgets; on the second prompt, `ar` runs twice as fast as on the first."""
    cells, base, records = [], {}, {}
    for prompt in (0, 1):
        plain = Cell(prompt, None, "ar", (*more.items(), ("budget", None)))
        drafting = [Cell(prompt, None, "retrieval", (*more.items(), ("budget", size))) for size in (64, 128)]
        cells += [plain, *drafting]
        base |= dict.fromkeys((plain, *drafting), plain)
        records[plain] = [record(10 + 10 * prompt, prompt_tokens=9)] * 2
        for number, cell in enumerate(drafting):
            rates = (20 + 10 * number, 40 + 10 * number)
            records[cell] = [record(rate, {"retrieval -> full": 0.8 + 0.1 * number}, prompt_tokens=9) for rate in rates]
    return report_of(dict.fromkeys(more, (0.0, 1.0)) | {"budget": (64, 128)}, cells, base, records)


def test_0_and_0_0_are_the_same_setting():
    def run(temperature, **more):
        facts = {"prompt_sha256": "a", "prompt_tokens": 9, "method": "ar", "repeat": 0, "machine": {"name": "m"}}
        return identity(facts | {"settings": {"temperature": temperature, "list": [1.0, 0.5]} | more})

    assert run(0) == run(0.0) == run(0, list=(1, 0.5)) and run(1) == run(1.0)
    assert len({run(0), run(0.5), run(1), run(True), run(False), run("0")}) == 6


def test_rows_are_means_over_prompts_of_medians_over_repeats():
    plain, small, large = grid_report().rows
    assert (plain["budget"], small["budget"], large["budget"]) == (None, 64, 128)
    assert (plain["tokens_per_s"], small["tokens_per_s"], large["tokens_per_s"]) == (15, 30, 40)
    assert small["speedup"] == pytest.approx((30 / 10 + 30 / 20) / 2)
    assert small["speedup_sd"] == pytest.approx(1.5 / 2**0.5)
    assert small["spread"] == pytest.approx(20 / 30) and plain["spread"] == 0
    assert (small["prompts"], small["repeats"], small["equals_ar"]) == (2, 2, True)


def test_doubts_are_told():
    found = list(notes(grid_report()))
    assert found[0].startswith("±: ") and "(retrieval 67 %)" in found[1]
    assert found[2] == "other load: other processes used 0.5 cores while these runs were measured"  # perhaps long ago


def test_tables_have_a_column_for_each_value():
    tables = {pivot.title: pivot for pivot in pivots(grid_report())}
    assert list(tables) == [f"{name} by budget" for name in ("speedup over ar", "tokens/s", "tokens/verification")] + [
        "acceptance a token by budget",
        "accepted of drafted by budget",
    ]
    speed = tables["tokens/s by budget"]
    assert speed.heads == ("method", "64", "128")
    assert speed.rows[0] == ("ar", "15.00 ±7.07", "15.00 ±7.07")  # the same for each: it reads no budget
    assert tables["acceptance a token by budget"].rows == (("retrieval", "retrieval -> full", "80 % ±0", "90 % ±0"),)
    assert tables["accepted of drafted by budget"].rows == (("retrieval", "retrieval -> full", "40 % ±0", "45 % ±0"),)


def test_the_csv_has_a_line_for_each_point():
    rows = list(csv.DictReader(csv_text(grid_report()).splitlines()))
    assert [(row["method"], row["budget"]) for row in rows] == [("ar", ""), ("retrieval", "64"), ("retrieval", "128")]
    assert [row["acceptance retrieval -> full"] for row in rows] == ["", "0.8", "0.9"]
    assert [row["accepted_of_drafted retrieval -> full"] for row in rows] == ["", "0.4", "0.45"]


def test_a_closed_pipe_loses_no_file(tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    run = SimpleNamespace(report=grid_report, interrupted=False)
    monkeypatch.setattr(measure, "run_measurement", lambda *_: run)
    asked = SimpleNamespace(request=SimpleNamespace(dry_run=False, is_first=True))
    output = measure.BenchOutput(False, True, csv=tmp_path / "grid.csv")
    with pytest.raises(BrokenPipeError):
        measure.run_bench(asked, SimpleNamespace(print=closed, table_width=80), output, None)
    assert "retrieval" in (tmp_path / "grid.csv").read_text()


class TwoRanks:
    """A group whose rank 0 runs first: what it broadcasts is kept for rank 1."""

    rank, sent = 0, ()

    def broadcast(self, value):
        if self.rank == 0:
            self.sent = json.dumps(value)
        return json.loads(self.sent)


def test_rank_0_knows_what_is_finished(tmp_path, monkeypatch):
    """The ranks' machines differ: none but rank 0 would find its own runs in the file."""
    monkeypatch.setattr(measure, "PointsFile", lambda *_: SimpleNamespace(kept=[kept], close=lambda: None))
    monkeypatch.setattr(measure, "open_bench", lambda *_: grid)
    group, cell, display = TwoRanks(), Cell(0, None, "ar", ()), SimpleNamespace(close=lambda: None)
    facts = {"prompt_sha256": "a", "prompt_tokens": 9, "method": "ar", "repeat": 0, "settings": {}}
    kept = record(10, **facts, machine={"name": "rank 0"})
    asked = SimpleNamespace(
        request=SimpleNamespace(group=group), points=tmp_path / "runs.jsonl", repeats=1, in_turn=False
    )
    for group.rank in (0, 1):
        own = facts | {"machine": {"name": f"rank {group.rank}"}}
        grid = SimpleNamespace(asked=asked, cells=[cell], facts=lambda *_, own=own: own)
        run = measure.run_measurement(asked, SimpleNamespace(warn=pytest.fail), True, display)
        assert run.finished == {cell: {0: kept}} and not run.pending


def test_values_of_0_are_in_the_labels_of_charts():
    assert list(series(grid_report(temperature=0.0), "budget", "speedup")) == ["retrieval temperature 0"]


def test_options_with_their_usual_values_ask_for_no_grid(triforce_here):
    for options, kind in (
        (("--no-cache", "--prompts", "1"), "bench"),
        (("--no-cache", "--prompts", "2"), "bench_grid"),
        (("--cache",), "bench_grid"),
    ):
        answer = triforce_here("bench", TEXT, *SMALL, "--context", "40", "--json", *options)
        assert answer.returncode == 0 and json.loads(answer.stdout)["type"] == kind


def test_lines_of_charts(tmp_path):
    report = grid_report()
    plain = series(report, "budget", "tokens_per_s")["ar"]
    assert [(x, y) for x, y, _ in plain] == [(64, 15), (128, 15)] and plain[0][2] == pytest.approx(50**0.5)
    assert [(x, y) for x, y, _ in series(report, "budget", "acceptance")["retrieval"]] == [(64, 0.8), (128, 0.9)]
    assert list(series(report, "budget", "speedup")) == ["retrieval"]
    pytest.importorskip("matplotlib")
    plot(tmp_path / "grid.png", report)
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_whole_numbers_have_whole_ticks():
    cells = [Cell(0, None, "ar", (), batch) for batch in (1, 2)]
    records = {cell: [record(10, prompt_tokens=9)] for cell in cells}
    report = report_of({"batch": (1, 2)}, cells, dict(zip(cells, cells, strict=True)), records)
    assert all(chart.whole for row in charts(report) for chart in row)
    ((chart,), *_) = charts(report_of({"temperature": (0.5, 1)}, [], {}, {}))
    assert not chart.whole
