"""Parts of a batch: `--shard I/N`, and the pieces and workers of `--ray`, here without a cluster."""

import json
import os
import shlex
import subprocess
from importlib.metadata import version

import numpy as np
import pytest

from tests.support.command import COMMAND, assert_error, environment
from tests.support.paths import ROOT
from triforce_cli.batch.batch_files import Shard, open_batch, parse_shard
from triforce_cli.batch.ray_batch import Reader, Worker, pieces
from triforce_cli.options.command_request import OutputOptions, Request
from triforce_cli.options.settings import resolve
from triforce_cli.run.ray_cluster import RESULT, ROW, WorkerJob

GREEDY = {"max_new_tokens": 12, "temperature": 0.0}


@pytest.fixture
def batch(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": id, "prompt": f"Once {id} upon a time" * (1 + id % 3)} for id in range(7)]
    path.write_text("\n".join([*map(json.dumps, lines[:4]), "", "no JSON", *map(json.dumps, lines[4:])]))
    return path


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_each_line_is_in_one_part_and_neighbours_are_together(batch, count):
    parts = []
    for index in range(count):
        file = open_batch(str(batch), None, pytest.fail, Shard(index, count))
        parts.append([line.number for line in file.lines()])
        file.close()
    assert [number for part in parts for number in part] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert max(map(len, parts)) <= 8 / count + 2


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "1/2/3", "a/b", "0/4 x"])
def test_what_is_no_part_is_refused(triforce, batch, text):
    assert_error(triforce("generate", "--batch", batch, f"--shard={text}"), 2, "--shard")


def test_the_first_of_four_parts():
    assert parse_shard("0/4") == Shard(0, 4)


def test_the_parts_together_have_the_results_of_the_whole(triforce, batch, tmp_path):
    def results(*more):
        result = triforce("generate", "--batch", batch, "-n", "8", "--seed", "5", *more)
        return {event["line"]: event.get("text") for event in map(json.loads, result.stdout.splitlines())}

    whole = results()
    parts = [results("--shard", f"{index}/3") for index in range(3)]
    assert len(whole) == 8 and sum(map(len, parts)) == 8
    assert parts[0] | parts[1] | parts[2] == whole
    empty = triforce("generate", "--batch", batch, "--shard", "1/1000")
    assert empty.returncode == 0 and not empty.stdout and not empty.stderr


@pytest.mark.parametrize("option", ["--shard=0/2", "--ray=local"])
def test_a_single_prompt_has_no_parts(triforce, option):
    assert_error(triforce("generate", "Hello", option), 2, "goes with --batch")


def test_pieces_have_common_beginnings_next_to_each_other():
    places = [(b"ab"[number % 2 : number % 2 + 1], number, 10 * number) for number in range(8)]
    assert pieces(places, workers=1, parallel=2) == [
        [(0, 0), (2, 20)],
        [(4, 40), (6, 60)],
        [(1, 10), (3, 30)],
        [(5, 50), (7, 70)],
    ]
    assert len(pieces(places, workers=2, parallel="auto")) == 8  # four for each worker
    assert list(map(len, pieces(places * 5, workers=2, parallel="auto"))) == [5] * 8
    assert len(pieces(places * 10_000, workers=1, parallel=1)) == 10_000
    assert pieces([], workers=2, parallel=1) == []


@pytest.fixture
def worker(tiny_model_dir, batch):
    """Return a worker that reads lines of the batch as it would over the network."""
    file = batch.open("rb")

    def make(**changes):
        settings = resolve({"model": str(tiny_model_dir), **GREEDY}, {}, "cpu")
        job = {"request": Request(settings, None, "generate"), "longest": 100, "version": version("triforce")}
        read = Reader(os.getpid(), file.fileno()).read
        return Worker(WorkerJob(**job | changes), OutputOptions(json=False, quiet=False, verbose=0), 2, read)

    yield make
    file.close()


def answered(worker, *places):
    found = worker({ROW: np.array([json.dumps(places)])})
    assert list(found) == [RESULT] and len(found[RESULT]) == 1
    return [json.loads(each) for each in json.loads(found[RESULT][0])]


def test_a_worker_answers_as_a_single_process(triforce, batch, worker):
    starts = [0, *np.cumsum([len(line) + 1 for line in batch.read_bytes().split(b"\n")]).tolist()]
    alone = triforce("generate", "--batch", batch, "-n", "12", "--temperature", "0")
    expected = {event["line"]: event.get("text") for event in map(json.loads, alone.stdout.splitlines())}
    own = worker()
    for lines in ((2, 1, 9), (4,)):
        found = answered(own, *((line, starts[line - 1]) for line in lines))
        assert {event["line"]: event["text"] for event in found} == {line: expected[line] for line in lines}


def test_a_worker_of_another_version_fails_its_lines_alone(worker):
    (event,) = answered(worker(version="0.0"), (1, 0))
    assert event["type"] == "error" and event["id"] == 0 and event["line"] == 1
    assert "the command is of 0.0" in event["message"] and "same version" in event["hint"]


@pytest.mark.long
def test_the_recipe_for_slurm_answers_each_line_once(batch, tiny_model_dir, tmp_path):
    """The recipe of examples/, with an `srun` that runs its tasks one after the other."""
    srun = 'for SLURM_PROCID in 0 1; do export SLURM_PROCID SLURM_NTASKS=2; "$@" || code=$?; done; exit ${code:-0}'
    for name, script in {"srun": srun, "triforce": f'exec {shlex.join(map(str, COMMAND))} "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    variables = environment(tmp_path, tiny_model_dir)
    variables |= {"PATH": f"{tmp_path}:{variables['PATH']}", "TRIFORCE_MAX_NEW_TOKENS": "4"}
    recipe = [str(ROOT / "examples" / "batch.sbatch"), str(batch), str(tmp_path / "answers"), "--seed", "5"]
    done = subprocess.run(recipe, env=variables, capture_output=True, text=True)
    assert done.returncode == 1 and "1 request failed" in done.stderr, done.stderr  # the line that is no request
    answers = "".join((tmp_path / f"answers-{part}.jsonl").read_text() for part in (0, 1))
    assert sorted(json.loads(line)["line"] for line in answers.splitlines()) == [1, 2, 3, 4, 6, 7, 8, 9]
