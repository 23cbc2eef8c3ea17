"""`triforce bench` on the tiny model: in this process where nothing forbids it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from offload.errors import SettingsError
from offload.settings.config import Speculation
from tests.support.terminal import Pty, Screen
from tests.support.waiting import until
from triforce_cli.app import run
from triforce_cli.bench.cells import Cell
from triforce_cli.bench.compared import parse_methods, speculations
from triforce_cli.bench.report import BENCH, Report
from triforce_cli.bench.report_text import report_text
from triforce_cli.bench.rows import Finished
from triforce_cli.run.processor import OtherLoad

TEXT = "the cat and the dog and the cat and the dog and " * 8
SMALL = ("--context", "100", "--new", "16", "--repeats", "2", "--budget", "64", "--temperature", "0")


@pytest.fixture
def settings(tiny_model_dir, tmp_path, monkeypatch):
    """The environment of a command on the tiny model, which is too small for threads to share."""
    chosen = {"HOME": tmp_path / "home", "MODEL": tiny_model_dir, "DEVICE": "cpu", "DTYPE": "float32", "SEED": "1"}
    chosen |= {"CONFIG": tmp_path / "config", "THREADS": 1}
    before = torch.get_num_threads()
    for name in ("METHOD", "DRAFT", "PROFILE", "COLOR"):
        monkeypatch.delenv(f"TRIFORCE_{name}", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(f"TRIFORCE_{name}", str(value))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(settings, monkeypatch, capsys):
    """`bench("text", "--new", "8") -> (exit code, stdout, stderr)`."""

    def call(*args):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = run(["bench", *(str(arg) for arg in args)])
        return code, *capsys.readouterr()

    return call


def refused(result, *words):
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 2
    for word in words:
        assert word in err


def test_keys_and_values_are_of_the_format_that_is_asked_for(bench):
    refused(bench(TEXT, *SMALL, "--kv", "packed"), "--kv packed packs keys and values in bfloat16")
    code, out, err = bench(TEXT, *SMALL, "--methods", "lookup", "--kv", "q8", "--json")
    assert code == 0 and json.loads(out)["settings"]["kv"] == "q8"
    assert "--kv q8 changes the answer" in err


def names_of(out):
    """Return the first column of the table, which stands between blank lines."""
    return [line.split()[0] for line in out.split("\n\n")[1].splitlines() if not line.startswith(" ")]


def test_json_holds_every_method_and_every_sample(bench, tiny_model_dir):
    code, out, err = bench(TEXT, *SMALL, "--draft", tiny_model_dir, "--json")
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    found = json.loads(line)
    names = [row["method"] for row in found["methods"]]
    assert names == ["ar", "auto", "lookup", "naive", "retrieval", "streaming", "triforce"]
    assert (found["prompt_tokens"], found["new_tokens"], found["repeats"], found["interrupted"]) == (100, 16, 2, False)
    assert found["machine"]["name"] and found["machine"]["threads"] >= 1 and found["date"].endswith("+00:00")
    assert found["settings"]["budget"] == 64
    plain = found["methods"][0]
    assert plain["speedup"] == 1 and plain["acceptance"] == {} and plain["tokens_per_verification"] == 1
    for row in found["methods"]:
        assert row["repeats"] == len(row["runs"]) == 2
        assert all(len(sample["tokens"]) == 16 for sample in row["runs"])  # no end-of-sequence token has ended it
        assert row["ttft_s"] > found["prefill_s"] > 0
        assert row["equals_ar"] or row["lossless"]
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / plain["tokens_per_s"], rel=1e-2)
        low, high = row["speedup_range"]
        assert low <= high and row["spread"] >= 0
        assert (row["memory_bytes"] > plain["memory_bytes"]) == (row["method"] not in ("ar", "lookup"))
    assert found["methods"][2]["tokens_per_verification"] > 1
    assert all(sum(sample["tbt_s"]) < sample["total_s"] for sample in plain["runs"])


def test_a_piped_table_is_plain_text_and_names_the_machine(bench):
    code, out, err = bench(TEXT, *SMALL, "--methods", "retrieval,lookup,lookup")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for word in (" thread", "float32", "100 prompt tokens", "16 new tokens", "temperature 0", "2 repeats"):
        assert word in lines[0]
    assert names_of(out) == ["method", "ar", "retrieval", "lookup"]
    assert re.search(
        r"^lookup +[\d.]+ m?s +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+x \([\d.]+-[\d.]+\) +lookup→full \d+ % \(\d+ %\) +[\d.]+ ",
        out,
        re.M,
    )
    assert "\x1b" not in out and "─" not in out


def test_a_narrow_terminal_gets_whole_numbers_and_no_remains_of_progress(settings, monkeypatch):
    tty = Pty(60, 20)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, tty.stream())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["bench", TEXT, *SMALL, "--methods", "lookup"]) == 0
    output = tty.output()
    assert "bench · ar · run 1 of 4" in output and "bench · lookup · run 4 of 4" in output
    after_prefill = re.sub(r"^(\n|\r|\x1b\[1A|\x1b\[2K)*", "", output.rpartition("\x1b[?25h")[2])
    shown = Screen(60, 20).feed(after_prefill).lines()
    (row,) = (line for line in shown if line.startswith("lookup "))
    assert re.fullmatch(r"lookup .* +[\d.]+ +[\d.]+x \([\d.]+-[\d.]+\).*", row)
    assert not any(line.startswith("bench ·") for line in shown)


def record(rate, ids=(1, 2, 3), **more):
    """Return a run of a method, as it is kept."""
    times = {"ttft_s": 1.5, "tbt_median_s": 1 / rate, "tbt_p95_s": 2 / rate, "total_s": 9.0, "tbt_s": ()}
    counts = {"tokens_per_s": rate, "tokens_per_verification": 1.0, "verifications": len(ids), "nodes": None}
    empty = {"acceptance": {}, "accepted_of_drafted": {}, "time_share": {}, "mask_s": {}, "lossless": None}
    return times | counts | empty | {"sampling": "greedy", "tokens": list(ids)} | more


def rows_of(**runs):
    cells = [Cell(0, None, method, ()) for method in runs]
    records = {cell: runs[cell.method] for cell in cells}
    base = dict.fromkeys(cells, Cell(0, None, "ar", ()))
    return Finished(cells, base, records).methods(dict.fromkeys(runs, 2**20))


def text_of(width=None, other_load=None, **runs):
    return report_text(Report(BENCH, FACTS, rows_of(**runs), other_load=other_load), width).plain


FACTS = {
    "machine": {"name": "A processor with a long name", "threads": 2, "engine": "cpu, bfloat16, avx512 kernel"},
    "model": "smollm2-135m",
    "prompt_tokens": 1000,
    "new_tokens": 128,
    "repeats": 2,
    "settings": {"temperature": 0.0},
}


@pytest.mark.parametrize("width", range(40, 121, 8))
def test_the_report_fits_the_terminal(width):
    accepted = {"retrieval -> full": 0.91, "lookup -> retrieval": 0.4}
    fast = [record(rate, acceptance=accepted, tokens_per_verification=3.2) for rate in (60, 80)]
    text = text_of(width, ar=[record(20), record(21)], triforce=fast)
    assert max(map(len, text.splitlines())) <= width
    (row,) = (line for line in text.splitlines() if line.startswith("triforce"))
    assert "3.41x (3.00-3.81)" in row and "70.00" in row
    assert ("retrieval→full 91 %" in row) == (width > 65)
    assert "lookup→retrieval 40 %" in text or width < 66


def test_one_repeat_shows_no_speedup():
    text = text_of(ar=[record(20)], lookup=[record(60)])
    assert "x (" not in text and "3.00" not in text
    assert "use --repeats 3" in text


def test_masks_have_a_column_with_their_time():
    text = text_of(ar=[record(20, mask_s={"token": 31e-6 * n, "row": 4e-5}) for n in (1, 2, 3)], lookup=[record(60)])
    assert "mask us a" in text and "62, 40" in text
    assert "mask" not in text_of(ar=[record(20)])


def test_a_noisy_run_is_flagged():
    quiet = text_of(other_load=0.1, ar=[record(20), record(21)], lookup=[record(60), record(62)])
    assert "noisy" not in quiet and "other load" not in quiet
    lines = text_of(other_load=0.8, ar=[record(20), record(21)], lookup=[record(60), record(70)]).splitlines()
    assert lines[-2].startswith("noisy: ") and "(lookup 15 %)" in lines[-2]
    assert lines[-1] == "other load: other processes used 0.8 cores while these runs were measured"


def test_other_load_is_that_of_other_processes():
    load = OtherLoad()
    code = "import time; end = time.time() + 0.6\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load.cores() > 0.2


def test_sampling_compares_no_outputs(bench):
    args = [arg for arg in SMALL if arg not in ("--temperature", "0")]
    args += ["--temperature", "0.8", "--sampling", "fastest"]
    code, out, _ = bench(TEXT, *args, "--methods", "lookup", "--repeats", "1", "--json")
    found = json.loads(out)
    assert code == 0
    assert {row["equals_ar"] for row in found["methods"]} == {None}


def test_what_is_refused_before_any_work(bench, tmp_path):
    refused(bench(TEXT, "--context", "5000"), "fewer than --context 5,000", "--context ")
    refused(bench(TEXT, "--new", "3000"), "2,048", "--max-new-tokens")
    refused(bench(TEXT, "--new", "0"), "max-new-tokens is 0")
    refused(bench(TEXT, "--methods", "ar,lokup"), "'lokup'", "did you mean lookup?")
    refused(bench(TEXT, "--methods", ""), "''")
    refused(bench(TEXT, "--methods", "naive"), "draft model")
    refused(bench(TEXT, "--repeats", "0"), "--repeats")


def test_a_plot_that_cannot_be_is_refused_before_any_work(bench, tmp_path, monkeypatch):
    missing = ("--model", "no-such-model")  # would be said later
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        refused(bench(TEXT, *missing, "--plot", tmp_path / "a.png"), "matplotlib", "pip install '.[plot]'")
    if find_spec("matplotlib"):
        refused(bench(TEXT, *missing, "--plot", tmp_path / "none" / "a.png"), "no folder", "none")
        refused(bench(TEXT, *missing, "--plot", tmp_path), "is a folder")
        refused(bench(TEXT, *missing, "--plot", tmp_path / "a.docx"), "a.docx", "png")


def test_a_plot(bench, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = bench(TEXT, *SMALL, "--methods", "lookup", "--plot", tmp_path / "bench.png")
    assert code == 0 and "lookup" in out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir() if file.suffix] == ["bench.png"]


@pytest.mark.long
def test_ctrl_c_leaves_the_table_of_what_is_done(settings):
    tty = Pty(80, 24)
    args = ("bench", TEXT, "--new", "40", "--repeats", "1000", "--methods", "lookup")
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-m", "triforce_cli", *args]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=tty.stream(), env=environment, text=True
    ) as process:
        until(lambda: re.search(rb"run ([4-9]|\d\d+) of 2000", tty.written()))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in tty.output()
    assert names_of(out) == ["method", "ar", "lookup"]


# Without a model --------------------------------------------------------------------------------------------------


def test_medians_speedup_and_the_first_difference():
    plain = [record(10), record(30), record(20)]
    fast = [record(60, acceptance={"lookup -> full": 0.5}), record(80, (1, 5, 3), lossless=True)]
    first, second = rows_of(ar=plain, lookup=fast, auto=[])  # auto has not run yet
    assert (first["tokens_per_s"], first["speedup"], first["differs_at"], first["equals_ar"]) == (20, 1, None, True)
    assert (second["tokens_per_s"], second["speedup"], second["differs_at"]) == (70, 3.5, 1)
    assert second["acceptance"] == {"lookup -> full": 0.5} and second["lossless"]


def test_methods():
    assert parse_methods(" triforce, lookup,triforce") == ("triforce", "lookup")
    with pytest.raises(SettingsError, match="'trifroce'") as raised:
        parse_methods("trifroce")
    assert "did you mean triforce?" in raised.value.hint
    assert list(speculations(("lookup",), Speculation())) == ["ar", "lookup"]
    assert "naive" not in speculations(None, Speculation())
    assert "naive" in speculations(None, Speculation(draft="a-model"))


def test_trees_have_a_column_with_their_nodes(bench):
    _, out, _ = bench(TEXT, *SMALL, "--methods", "lookup,lookup:tree=8", "--json")
    plain, chain, tree = json.loads(out)["methods"]
    assert plain["nodes"] is chain["nodes"] is None and 1 <= tree["nodes"] <= 8
    assert tree["equals_ar"]
    runs = {"ar": [record(10)], "lookup:tree=8": [record(10, nodes=7.5)]}
    assert re.search(r"\bnodes\b", text_of(**runs))
    assert "nodes" not in text_of(ar=runs["ar"])


def test_methods_with_trees():
    names = parse_methods("sequoia,specinfer:tree=8,lookup:tree=k-ary:2x2,triforce:none:tree=auto")
    found = speculations(names, Speculation(draft="a-model", tree="16"))
    shapes = {name: (each.method, each.draft, each.tree, each.tree_sampling) for name, each in found.items()}
    assert shapes == {
        "ar": ("ar", "a-model", "16", "without-replacement"),
        "sequoia": ("naive", "a-model", "auto", "without-replacement"),
        "specinfer:tree=8": ("naive", "a-model", "8", "with-replacement"),
        "lookup:tree=k-ary:2x2": ("lookup", "a-model", "k-ary:2x2", "without-replacement"),
        "triforce:none:tree=auto": ("triforce", "none", "auto", "without-replacement"),
    }
    found = speculations(
        parse_methods("triforce:none:middle=h2o:tree=4,auto:middle=streaming"), Speculation(middle="h2o")
    )
    assert [(each.draft, each.middle, each.tree) for each in found.values()] == [
        ("lookup", "h2o", "chain"),
        ("none", "h2o", "4"),
        ("lookup", "streaming", "chain"),
    ]
    for wrong, words in (
        ("lookup:middle=h2o", "middle level"),
        ("triforce:middle=h20", "'h20' cannot be its middle level"),
        ("lookup:tree=bush", "'bush'"),
        ("lookup:tree=", "tree is ''"),
        ("lookup:", "drafter"),
    ):
        with pytest.raises(SettingsError, match=words):
            parse_methods(wrong)
