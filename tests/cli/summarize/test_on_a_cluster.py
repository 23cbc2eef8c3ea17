"""`triforce summarize --ray`, with workers in this process in the place of a cluster: the texts of one machine."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from offload.errors import PromptError
from tests.support.command import assert_error
from triforce_cli.run.ray_cluster import RESULT, ROW, Workers, joined
from triforce_cli.summarize import ray_summaries
from triforce_cli.summarize.ray_summaries import Worker

STORY = "The cat sat on the mat, and what it saw there nobody knows.\n\n"
GREEDY = ("--temperature", "0", "-n", "12")
ASKED = ("--question", "Who sat?", "--question", "Where?")


@pytest.fixture
def documents(tmp_path):
    for name, text in {"a": STORY * 3, "b": STORY * 9, "c": "One dog."}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return [tmp_path / f"{name}.txt" for name in "abc"]


@pytest.fixture
def rows(monkeypatch):
    """Answer rows in this process, the last one first; return what each run was given."""
    given = []

    def mapped(rows, worker, arguments, workers):
        given.append(len(rows))
        own = worker(*arguments) if rows else None
        for row in reversed(rows):
            (result,) = own({ROW: np.array([row])})[RESULT]
            yield result

    monkeypatch.setattr(ray_summaries, "joined", lambda address: nullcontext())
    monkeypatch.setattr(ray_summaries, "workers_of", lambda opened: Workers(1, 1, 0))
    monkeypatch.setattr(ray_summaries, "mapped", mapped)
    return given


def told(out):
    """What JSON lines say: texts joined, and which sequences ended."""
    events = [json.loads(line) for line in out.splitlines()]
    texts = "".join(event.get("text", "") for event in events)
    return texts, [event["type"] for event in events if event["type"] in ("section", "part", "done")]


@pytest.mark.parametrize("more", [ASKED, ("--parallel", "2", *ASKED), ()])
def test_the_output_is_that_of_one_machine(triforce, documents, rows, more):
    args = ("summarize", *documents, *GREEDY, *more)
    alone, result = triforce(*args), triforce(*args, "--ray", "auto")
    assert result.returncode == 0, result.stderr
    assert result.stdout == alone.stdout and rows == [3]
    assert "1 worker with 1 CPU core each" in result.stderr and "3 requests done" in result.stderr
    assert told(triforce(*args, "--ray", "auto", "--json").stdout) == told(triforce(*args, "--json").stdout)


def test_a_document_in_parts_and_files_of_their_own(triforce, documents, rows, tmp_path):
    documents[1].write_text("\n\n".join(f"Chapter {i}. The cat went to the {i}th house." for i in range(300)))
    args = ("summarize", *documents, "--temperature", "0", "-n", "24", "--map-reduce")
    outputs = [[f for each in "abc" for f in ("-o", tmp_path / f"{kind}-{each}")] for kind in ("alone", "ray")]
    assert triforce(*args, *outputs[0]).returncode == 0
    assert triforce(*args, *outputs[1], "--ray", "auto").returncode == 0
    for each in "abc":
        assert (tmp_path / f"ray-{each}").read_text() == (tmp_path / f"alone-{each}").read_text() != ""


def test_a_failed_document_leaves_the_others_and_is_tried_again(triforce, documents, rows, monkeypatch):
    args = ("summarize", *documents, *GREEDY, *ASKED)
    expected = triforce(*args).stdout
    answer = Worker._answer

    def fail(self, tasks, texts):
        if tasks[0].section.document.endswith("b.txt"):
            raise PromptError("it is too odd", "write another")
        answer(self, tasks, texts)

    monkeypatch.setattr(Worker, "_answer", fail)
    failed = triforce(*args, "--ray", "auto")
    assert failed.returncode == 1 and "b.txt: it is too odd" in failed.stderr and "1 failed" in failed.stderr
    parts = expected.split("# " + str(documents[1]))[0], expected[expected.index("# " + str(documents[2])) :]
    assert failed.stdout == "".join(parts)
    monkeypatch.setattr(Worker, "_answer", answer)
    again = triforce(*args, "--ray", "auto")
    assert again.stdout == expected and rows == [3, 1]
    assert "2 of 3 documents reused from an earlier run" in again.stderr
    triforce(*args, "--ray", "auto")
    assert rows == [3, 1, 3]  # a whole run leaves nothing


def test_a_machine_without_the_model_is_the_error_of_its_documents(triforce, documents, rows, monkeypatch):
    def load(self, job):
        raise FileNotFoundError("no such model here")

    monkeypatch.setattr(Worker, "_load", load)
    result = triforce("summarize", documents[0], *GREEDY, "--ray", "auto", "-q")
    assert_error(result, 1, "a.txt: on ", "no such model here")


def test_what_ray_prints_does_not_get_into_the_text(capsys, monkeypatch):
    """Its driver prints to stdout that a worker has died."""
    context = SimpleNamespace(enable_progress_bars=True, print_on_execution_start=True)
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=lambda: context))
    ray = SimpleNamespace(init=lambda **more: None, shutdown=lambda: print("(raylet) retried"), data=data)
    for name, module in {"ray": ray, "ray.data": data}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with joined("local"):
        print("(raylet) A worker died")
        assert not context.enable_progress_bars
    print("text")
    assert capsys.readouterr().out == "text\n"


def test_no_cluster_at_the_address(triforce, documents, monkeypatch):
    for name in ("ray", "ray.data"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(data=None))
    result = triforce("summarize", documents[0], *GREEDY, "--ray", "127.0.0.1:1")
    assert_error(result, 2, "--ray 127.0.0.1:1", "ray start --head")


def test_ranks_are_no_workers(triforce, documents):
    result = triforce("summarize", documents[0], "--ray", "auto", "--tensor-parallel", "2")
    assert_error(result, 2, "--ray", "--tensor-parallel")
