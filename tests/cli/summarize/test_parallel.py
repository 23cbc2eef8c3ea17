"""`triforce summarize --parallel`: the texts, the order and the resumption of one at a time."""

import json
import re
from itertools import groupby

import pytest

from offload.engine import Engine
from offload.errors import TriforceError
from triforce_cli.summarize.finished_parts import FinishedParts
from triforce_cli.summarize.map_reduce import MapReduce

STORY = "The cat sat on the mat, and what it saw there nobody knows.\n\n"
BOOK = "\n\n".join(f"Chapter {i}. The cat went to the {i}th house and said what it had seen there." for i in range(150))
GREEDY = ("--temperature", "0", "-n", "12")
ASKED = ("--question", "Who sat?", "--question", "Where?", "--question", "What did it see on all those mats?")
REDUCED = ("--temperature", "0", "-n", "24")


@pytest.fixture
def files(tmp_path):
    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.txt").write_text(text)
        return [tmp_path / f"{name}.txt" for name in texts]

    return write


def events(out):
    return [json.loads(line) for line in out.splitlines()]


def told(out):
    """Return what the JSON lines say of the texts: kinds in order, and runs of text joined."""
    found = [event for event in events(out) if event["type"] != "prefill"]
    merged = []
    for kind, group in groupby(found, key=lambda event: event["type"]):
        group = sorted(group, key=lambda event: event.get("number", 0))  # parts come as they end
        if kind == "text":
            merged.append("".join(event["text"] for event in group))
        else:
            keep = ("type", "document", "question", "number", "parts", "round", "text", "finish_reason", "new_tokens")
            merged += [{name: event[name] for name in keep if name in event} for event in group]
    return merged


def test_answers_are_those_of_one_at_a_time_in_the_same_order(triforce_here, files):
    args = ("summarize", *files(a=STORY * 3, b=STORY * 9, c="One dog."), *ASKED, *GREEDY, "--method", "triforce")
    code, out, err = triforce_here(*args, "--parallel", 4)
    assert code == 0, err
    assert out == triforce_here(*args)[1]
    assert len(err.splitlines()) == 10
    assert re.search(r"^9 sequences, up to 4 together: \d+ written in .*/s\)$", err.splitlines()[-1])
    found = triforce_here(*args, "--parallel", 4, "--json")[1]
    assert told(found) == told(triforce_here(*args, "--json")[1])


def test_the_parts_of_a_long_document(triforce_here, files, tmp_path):
    args = ("summarize", *files(long=BOOK, short=STORY), *REDUCED)
    expected = triforce_here(*args, "--json")[1]
    code, out, err = triforce_here(*args, "--json", "--parallel", 3)
    assert code == 0, err
    assert told(out) == told(expected)
    labels = re.findall(r"^long\.txt, part (\d+) of (\d+): ", err, re.MULTILINE)
    assert sorted(int(number) for number, _ in labels) == list(range(1, int(labels[0][1]) + 1))
    assert not list((tmp_path / "home" / "parts").glob("*"))


def test_parts_are_saved_as_they_end_and_an_interrupt_loses_none(triforce_here, files, tmp_path, monkeypatch):
    args = ("summarize", *files(long=BOOK), *REDUCED, "--json")
    whole = triforce_here(*args)[1]
    save, saved = FinishedParts.save, []

    def interrupted(self, ids, text):
        save(self, ids, text)
        saved.append(text)
        if len(saved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(FinishedParts, "save", interrupted)
        code, _, err = triforce_here(*args, "--parallel", 4)
    assert code == 130
    assert err.endswith("the finished parts are saved: run the same command again to resume after them\n")
    assert len(list((tmp_path / "home" / "parts").glob("*.json"))) == 2
    code, out, err = triforce_here(*args, "--parallel", 2)
    assert code == 0 and "2 of " in err and "reused from an earlier run" in err
    taken = [event for event in events(out) if event["type"] == "part" and event["taken_over"]]
    assert sorted(event["text"] for event in taken) == sorted(saved)
    assert told(out) == told(whole)


def test_an_interrupt_writes_what_waits_for_its_turn(triforce_here, files, monkeypatch):
    args = ("summarize", *files(a=STORY), *ASKED, "--temperature", "0", "-n", "60", "--method", "ar", "--stop", "zzz")
    whole = triforce_here(*args, "-q")[1]
    generate_batch = Engine.generate_batch

    def interrupted(self, requests, parallel):
        for number, each in enumerate(generate_batch(self, requests, parallel)):
            if number == 150:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(Engine, "generate_batch", interrupted)
    code, out, err = triforce_here(*args, "--parallel", 3)
    assert code == 130
    assert err.count("interrupted") == 3
    found, expected = (re.split(r"^## .*\n\n", text, flags=re.MULTILINE)[1:] for text in (out, whole))
    assert len(found) == 3
    for some, all_ in zip(found, expected, strict=True):
        written = some.strip().rstrip("\ufffd")
        assert len(written) > 10 and all_.strip().startswith(written)


def test_an_error_of_one_document_leaves_the_others(triforce_here, files, monkeypatch):
    paths = files(a=STORY, long=BOOK, c="One dog.")

    steps = MapReduce.steps

    def failing(self, task):
        if task.parts:
            raise TriforceError("the model wrote no notes on any part", "use another --model")
        yield from steps(self, task)

    with monkeypatch.context() as patches:
        patches.setattr(MapReduce, "steps", failing)
        code, out, err = triforce_here("summarize", *paths, *REDUCED, "--parallel", 2)
    assert code == 1
    assert "error: long.txt: the model wrote no notes on any part" in err and "hint: use another --model" in err
    texts = [triforce_here("summarize", path, *REDUCED, "-q")[1] for path in (paths[0], paths[2])]
    assert out == f"# {paths[0]}\n\n{texts[0]}\n# {paths[1]}\n\n\n# {paths[2]}\n\n{texts[1]}"


def test_auto_and_what_is_refused(triforce_here, files):
    path = files(a=STORY)
    code, out, err = triforce_here("summarize", *path, *ASKED, *GREEDY, "--parallel", "auto")
    assert code == 0 and "3 sequences, up to 3 together" in err
    assert out == triforce_here("summarize", *path, *ASKED, *GREEDY)[1]
    code, out, err = triforce_here("summarize", *path, *ASKED, "--parallel", 2, "--link", 1)
    assert (code, out) == (2, "") and "offloaded keys and values" in err
