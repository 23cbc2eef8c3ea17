"""A line of `triforce chat` that fails with any exception: an error for that line, and the conversation goes on."""

import json

import pytest

from offload.session import Session

COMMAND = ("chat", "--json", "-n", "8", "--temperature", "0.8", "--seed", "3", "--sampling", "coupled")


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
    return [(turn["question"], turn["answer"]["text"]) for turn in json.loads(path.read_text())["turns"]]


def test_what_was_said_stays_and_the_next_lines_are_answered(triforce_here, failing, tmp_path):
    ask = [*COMMAND, "--session", tmp_path / "right.json"]
    triforce_here(*ask, stdin=b"Who?\nWhere?\nWhen?\n")
    failing(1, 3)
    lines = b"Who?\nWhere?\n/stats\n/retry\n/retry\nWhen?\n"  # the first /retry answers; the second one fails
    answer = triforce_here(*COMMAND, "--session", tmp_path / "failed.json", stdin=lines)
    events = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [event["message"] for event in events if event["type"] == "error"] == ["RuntimeError: planted"] * 2
    assert any(event["type"] == "reply" and event["command"] == "/stats" for event in events)
    assert answer.returncode == 1
    assert saved(tmp_path / "failed.json") == saved(tmp_path / "right.json")
