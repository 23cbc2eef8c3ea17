"""The pieces and workers of `--batch --ray`, here without a cluster."""

import json
from importlib.metadata import version

import pytest

from triforce_cli.batch.items import BatchItem, read_lines
from triforce_cli.batch.ray_batch import Worker, pieces
from triforce_cli.options.request import OutputOptions, Request
from triforce_cli.options.settings import resolve

GREEDY = {"max_new_tokens": 12, "temperature": 0.0}


@pytest.fixture
def batch(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": id, "prompt": f"Once {id} upon a time" * (1 + id % 3)} for id in range(7)]
    path.write_text("\n".join([*map(json.dumps, lines[:4]), "", "no JSON", *map(json.dumps, lines[4:])]))
    return path


def test_pieces_have_common_beginnings_next_to_each_other():
    def items(count):
        return [BatchItem(number, number, "ab"[number % 2]) for number in range(count)]

    assert pieces(items(8), workers=1, parallel=2) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert len(pieces(items(8), workers=2, parallel="auto")) == 8  # four for each worker
    assert list(map(len, pieces(items(40), workers=2, parallel="auto"))) == [5] * 8
    assert pieces([], workers=2, parallel=1) == []


@pytest.fixture
def worker(tiny_model_dir):
    def make(command_version):
        request = Request(resolve({"model": str(tiny_model_dir), **GREEDY}, {}, "cpu"), None, "generate")
        return Worker(request, OutputOptions(json=False, quiet=False, verbose=0), 2, 100, command_version)

    return make


def answered(worker, *lines):
    return list(map(json.loads, worker.answers(lines)))


def test_a_worker_answers_as_a_single_process(triforce, batch, worker):
    texts = dict(read_lines(str(batch), None, pytest.fail))
    alone = triforce("generate", "--batch", batch, "-n", "12", "--temperature", "0")
    expected = {event["line"]: event.get("text") for event in map(json.loads, alone.stdout.splitlines())}
    own = worker(version("triforce"))
    for lines in ((2, 1, 9), (4,)):
        found = answered(own, *((line, texts[line]) for line in lines))
        assert {event["line"]: event["text"] for event in found} == {line: expected[line] for line in lines}


def test_a_worker_of_another_version_fails_its_lines_alone(worker):
    (event,) = answered(worker("0.0"), (1, '{"id": 0, "prompt": "Once"}'))
    assert event["type"] == "error" and event["id"] == 0 and event["line"] == 1
    assert "the command is of 0.0" in event["message"] and "same version" in event["hint"]
