"""Where `triforce bench` over lists writes, batches as one of its lists, and whose runs it goes on with."""

import csv
import json
import shutil
from types import SimpleNamespace

from triforce_cli.bench import measure
from triforce_cli.bench.plot import write_figure

TEXT = " ".join(f"The cat went to house {number} and saw {number * 7} dogs there." for number in range(20))
SMALL = ("--new", "6", "--repeats", "1", "--temperature", "0", "--gamma2", "2")


def test_batches_are_one_of_the_lists(triforce_here, tmp_path):
    file, args = tmp_path / "runs.jsonl", (TEXT, *SMALL, "--context", "40,60", "--methods", "lookup", "--json")
    answer = triforce_here("bench", *args, "--batch", "1,3", "--points", file)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["axes"] == {"context": [40, 60], "batch": [1, 3]} and found["batch"] is None
    assert [(row["method"], row["context"], row["batch"]) for row in found["points"]] == [
        (method, context, batch) for context in (40, 60) for batch in (1, 3) for method in ("ar", "lookup")
    ]
    assert all(row["equals_ar"] and row["speedup"] for row in found["points"] if row["method"] == "lookup")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(line["tokens"]) for line in lines] == [6, 6, 3, 3] * 2  # tokens of one sequence, or a list for each
    assert all(len(ids) == 6 for line in lines[2:4] for ids in line["tokens"])
    alone = json.loads(triforce_here("bench", *args, "--batch", "3", "--points", file).stdout)
    assert alone["batch"] == 3 and len(file.read_text().splitlines()) == len(lines)  # all of it was in the file
    ours = [row["tokens_per_s"] for row in found["points"] if row["batch"] == 3]
    assert [row["tokens_per_s"] for row in alone["points"]] == ours


def test_the_sequences_of_excerpts_are_different_ones(triforce_here, tmp_path):
    file = tmp_path / "runs.jsonl"
    args = (TEXT, *SMALL, "--context", "40", "--methods", "ar", "--batch", "2", "--prompts", "2")
    code, out, err = triforce_here("bench", *args, "--points", file)
    assert code == 0 and "batches of 2" in out, err
    outputs = [ids for line in file.read_text().splitlines() for ids in json.loads(line)["tokens"]]
    assert len({tuple(ids) for ids in outputs}) == 4


def test_a_batch_that_loses_tokens_is_told(triforce_here, monkeypatch):
    run_together = measure.run_together

    def wrong(benchmark, engine, prompts, method):
        run = run_together(benchmark, engine, prompts, method)
        changed = run.outputs[-1][::-1]
        return run if method.method == "ar" else run._replace(outputs=[*run.outputs[:-1], changed])

    monkeypatch.setattr(measure, "run_together", wrong)
    args = ("--context", "40,60", "--batch", "2", "--methods", "lookup")
    code, out, _ = triforce_here("bench", TEXT, *SMALL, *args)
    assert code == 0 and "other output than ar's, not by rounding: lookup" in out


def test_batches_that_cannot_run_are_refused(triforce_here, monkeypatch):
    args = (TEXT, *SMALL, "--context", "40,60", "--methods", "ar", "--batch", "3,1")
    code, out, err = triforce_here("bench", *args, "--link", "1", "--offload", "host")
    assert (code, out) == (2, "") and "--batch needs" in err
    monkeypatch.setattr("triforce_cli.run.job._fitting", lambda *_: 2)
    code, out, err = triforce_here("bench", *args)
    assert (code, out) == (1, "") and "3 sequences" in err and "use --batch 2" in err


def test_a_csv_on_standard_output(triforce_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("bench", TEXT, *SMALL, "--methods", "ar", "--context", "40,60", "--csv", "-")
    code, out, _ = triforce_here(*args)
    assert code == 0 and [row["context"] for row in csv.DictReader(out.splitlines())] == ["40", "60"]
    assert not (tmp_path / "-").exists()
    code, out, err = triforce_here(*args, "--json")
    assert (code, out) == (2, "") and "--csv - and --json both write to standard output" in err


def test_a_link_stays_one(triforce_here, tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("a.csv", "a.png"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    args = ("--methods", "ar", "--context", "40", "--csv", tmp_path / "a.csv")
    code, _, err = triforce_here("bench", TEXT, *SMALL, *args)
    assert code == 0, err
    write_figure(SimpleNamespace(savefig=lambda file, **_: file.write(b"drawn")), tmp_path / "a.png")
    assert all((tmp_path / name).is_symlink() for name in ("a.csv", "a.png"))
    assert (tmp_path / "there" / "a.png").read_bytes() == b"drawn" and (tmp_path / "there" / "a.csv").stat().st_size
    (tmp_path / "lost.csv").symlink_to(tmp_path / "nowhere" / "a.csv")
    code, _, err = triforce_here("bench", TEXT, *SMALL, "--csv", tmp_path / "lost.csv")
    assert code == 2 and f"there is no folder {tmp_path / 'nowhere'}" in err


def test_another_models_runs_are_not_gone_on_with(triforce_here, tmp_path, tiny_model_dir):
    """The same folder with other weights in it is another model."""
    model, file = tmp_path / "model", tmp_path / "runs.jsonl"
    shutil.copytree(tiny_model_dir, model)
    args = ("bench", TEXT, *SMALL, "--context", "40", "--methods", "ar", "--model", model, "--points", file)
    weights = model / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-2] ^= 1
    for lines, data in ((1, None), (1, None), (2, changed)):
        if data is not None:
            weights.write_bytes(data)
        assert triforce_here(*args).returncode == 0
        assert len(file.read_text().splitlines()) == lines
