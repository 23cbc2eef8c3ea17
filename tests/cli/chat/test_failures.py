"""A line of `triforce chat` that fails with any exception: an error for that line, and the conversation goes on."""

import json

import pytest

from offload import EngineConfig, open_model
from offload.events import Tokens
from offload.loading.tokenizers.text_stream import StopStrings
from offload.session.session import Session
from triforce_cli.output.progress import ProgressDisplay

COMMAND = ("chat", "--json", "-n", "8", "--temperature", "0.8", "--seed", "3")


@pytest.fixture
def failing(monkeypatch):
    """Return a function that lets the generations of some numbers fail after their first events."""

    def plan(*numbers):
        decode, count = Session._decode, iter(range(1000))

        def planted(self, *args):
            fails = next(count) in numbers
            for step, event in enumerate(decode(self, *args)):
                yield event
                if fails and step == 2:
                    raise RuntimeError("planted")

        monkeypatch.setattr(Session, "_decode", planted)

    return plan


def saved(path):
    return [(turn["question"], turn["answer"]) for turn in json.loads(path.read_text())["turns"]]


def test_what_was_said_stays_and_the_next_lines_are_answered(triforce_here, failing, tmp_path):
    ask = [*COMMAND, "--session", tmp_path / "right.json"]
    triforce_here(*ask, stdin=b"Who?\nWhere?\nWhen?\n")
    failing(1, 3)
    lines = b"Who?\nWhere?\nWhere?\nHow?\n/help\nWhen?\n"
    answer = triforce_here(*COMMAND, "--session", tmp_path / "failed.json", stdin=lines)
    events = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [event["message"] for event in events if event["type"] == "error"] == ["RuntimeError: planted"] * 2
    assert any(event["type"] == "reply" and event["command"] == "/help" for event in events)
    assert answer.returncode == 1
    assert saved(tmp_path / "failed.json") == saved(tmp_path / "right.json")


def interrupt(monkeypatch, owner, name, number, counts=lambda argument: True):
    """Let Ctrl-C come in the `number`-th call of a method whose argument counts, after it has done its work."""
    method, seen = getattr(owner, name), []

    def interrupted(self, argument):
        result = method(self, argument)
        seen.append(None) if counts(argument) else None
        if len(seen) == number and counts(argument):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("number", [2, 5])
@pytest.mark.parametrize("place", ["between tokens and their text", "while text is made"])
def test_an_interrupted_answer_is_the_text_of_its_tokens(
    triforce_here, tiny_model_dir, monkeypatch, tmp_path, place, number
):
    if place == "while text is made":
        interrupt(monkeypatch, StopStrings, "feed", number)
    else:
        interrupt(monkeypatch, ProgressDisplay, "event", number, lambda event: isinstance(event, Tokens))
    path = tmp_path / "saved.json"
    answer = triforce_here(*COMMAND, "--session", path, stdin=b"Who?\n")
    assert answer.returncode == 130
    (turn,) = json.loads(path.read_text())["turns"]
    tokenizer = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu")).tokenizer
    assert turn["ids"] and tokenizer.decode(turn["ids"]) == turn["answer"]
