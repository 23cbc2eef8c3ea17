"""`triforce bench --batch` on the tiny model: throughput of several sequences together."""

import json
import re
from types import SimpleNamespace

import pytest

from offload.errors import PromptError
from triforce_cli.bench import measure
from triforce_cli.bench.cells import Cell
from triforce_cli.bench.prompts import windows
from triforce_cli.bench.rows import Finished

TEXT = " ".join(f"The cat went to house {number} and saw {number * 7} dogs there." for number in range(40))
SMALL = ("--context", 60, "--new", 24, "--repeats", 1, "--temperature", 0)


@pytest.fixture
def bench(triforce_here):
    return lambda *args: triforce_here("bench", TEXT, *SMALL, *args)


def test_every_method_and_batch_with_the_outputs_of_one_at_a_time(bench):
    code, out, err = bench("--methods", "ar,lookup,retrieval", "--batch", "3,2", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["type"], found["prompt_tokens"], found["new_tokens"]) == ("bench_batch", 60, 24)
    rows = found["batches"]
    assert [(row["method"], row["batch"]) for row in rows] == [
        (method, size) for method in ("ar", "lookup", "retrieval") for size in (1, 2, 3)
    ]
    for row in rows:
        (run,) = row["runs"]
        assert row["equals_alone"] and row["differs_at"] is None
        assert [len(each) for each in run["outputs"]] == [24] * (3 if row["batch"] == 1 else row["batch"])
        assert 0 < run["seconds"] < run["total_s"] == row["total_s"]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / rows[rows.index(row) // 3 * 3]["tokens_per_s"], 0.01)
        assert row["token_s"] == pytest.approx(row["batch"] / row["tokens_per_s"], 0.01)
    assert len({tuple(each) for each in rows[0]["runs"][0]["outputs"]}) == 3  # of different prompts


def test_the_table_of_the_default_methods(bench):
    code, out, err = bench("--batch", "2")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(("ar ", "auto "))]
    assert [row[:2] for row in rows] == [["ar", "1"], ["ar", "2"], ["auto", "1"], ["auto", "2"]]
    assert re.search(r"^ar +2 +[\d.]+ +[\d.]+x +[\d.]+ +\d+ ms +as alone$|^ar +2 .* s +as alone$", out, re.MULTILINE)


def test_prompts_begin_at_different_places_and_go_on_at_the_start():
    assert windows([0], [1, 2, 3, 4, 5, 6], 5, 3) == [[0, 1, 2, 3, 4], [0, 3, 4, 5, 6], [0, 5, 6, 1, 2]]
    assert windows([], [1, 2], 5, 1) == [[1, 2, 1, 2, 1]]
    with pytest.raises(PromptError, match="a batch of 3 needs"):
        windows([0], [1, 2], 4, 3)


def test_an_output_that_differs_is_said():
    one, two = (Cell(0, None, "ar", (), size) for size in (1, 2))
    alone = {"tokens": [[1, 2, 3], [4, 5, 6]], "tokens_per_s": 10.0, "seconds": 1.0, "total_s": 2.0, "lossless": None}
    together = {
        "tokens": [[1, 2, 3], [4, 5, 7]],
        "tokens_per_s": 15.0,
        "seconds": 2.0,
        "total_s": 3.0,
        "lossless": True,
    }
    for sampling, expected in (("greedy", (False, 2, True)), ("fastest", (None, None, None))):
        records = {cell: [run | {"sampling": sampling}] for cell, run in ((one, alone), (two, together))}
        _, row = Finished([one, two], {one: one, two: one}, records).batches()
        assert (row["equals_alone"], row["differs_at"], row["lossless"]) == expected
        assert (row["ratio"], row["tokens_per_s"]) == (1.5, 15)


def test_ctrl_c_keeps_the_batches_that_are_done(bench, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "run_together", interrupted)
    code, out, err = bench("--methods", "ar", "--batch", "2", "--json")
    assert "interrupted after 1 of 2 runs" in err
    found = SimpleNamespace(**json.loads(out))
    assert (code, found.interrupted, [row["batch"] for row in found.batches]) == (130, True, [1])


@pytest.mark.parametrize("sizes", ["0", "2,", "many", "1;2", "-1", "9" * 5000])
def test_wrong_sizes(bench, sizes):
    code, out, err = bench("--batch", sizes)
    assert (
        (code, out) == (2, "")
        and "error: --batch is" in err
        and "which lists no numbers of sequences from 1 to 999" in err
    )


def test_what_cannot_run_together_is_refused(bench, monkeypatch):
    code, out, err = bench("--batch", "2", "--link", "1", "--offload", "host")
    assert (code, out) == (2, "") and "--batch needs" in err
    code, out, err = bench("--batch", "2", "--quality")
    assert (code, out) == (2, "") and "--batch has no effect with --quality" in err
    monkeypatch.setattr("triforce_cli.run.job._fitting", lambda *_: 2)
    code, out, err = bench("--batch", "3,1")
    assert (code, out) == (1, "") and "3 sequences" in err and "use --batch 2" in err
