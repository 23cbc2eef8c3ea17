"""Chats, summaries and batches that are killed (SIGKILL) at any moment, again and again."""

import json
import random
import subprocess
from contextlib import suppress

import pytest

from tests.support.command import COMMAND, environment
from triforce_cli.chat.conversation import load_conversation

pytestmark = pytest.mark.long
KILLS = 20
EXACT = ("--temperature", "0", "--dtype", "float32", "--threads", "1")
QUESTIONS = [f"What is {number}?" for number in range(12)]
BOOK = "\n\n".join(f"Chapter {i}. The cat went to the {i}th house and said what it had seen there." for i in range(900))


class Runs:
    """Runs of one command that are killed, and one that is not."""

    def __init__(self, model, home, *args):
        self._command, self._env = [*COMMAND, *map(str, args), *EXACT], environment(home, model)
        self._rng = random.Random(0)

    def whole(self, stdin=""):
        """Return what a run that is not killed writes to stdout."""
        done = subprocess.run(self._command, input=stdin, capture_output=True, text=True, env=self._env, check=True)
        return done.stdout

    def killed(self, began, within, stdin=""):
        """Kill a run a random time after a line on stdout or stderr that contains `began`; return its lines."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        lines = []
        with subprocess.Popen(self._command, text=True, env=self._env, **pipes) as process:
            with suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.close()
            for line in process.stdout:
                lines.append(line)
                if began in line:
                    break
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._rng.random() * within)
            process.kill()
            lines += process.stdout.readlines()
        return lines


def turns(path):
    return [(turn.question, turn.answer) for turn in load_conversation(path).turns] if path.exists() else []


def test_a_chat_that_is_killed_loses_the_answer_under_way_alone(endless_model_dir, tmp_path):
    path, whole = tmp_path / "session.json", tmp_path / "whole.json"
    ask = ("chat", "--json", "-n", "20", "--context", "2000", "--session")
    Runs(endless_model_dir, tmp_path, *ask, whole).whole("\n".join(QUESTIONS))
    expected, runs, kills = turns(whole), Runs(endless_model_dir, tmp_path, *ask, path), 0
    assert len(expected) == len(QUESTIONS)
    while (before := turns(path)) != expected:
        rest = "\n".join(QUESTIONS[len(before) :])
        if kills == KILLS:
            runs.whole(rest)
            continue
        ended = sum('"type":"done"' in line.replace(" ", "") for line in runs.killed('"text"', 0.05, rest))
        kills += 1
        after = turns(path)
        assert after == expected[: len(after)]
        assert len(after) >= len(before) + ended - 1, "the last answer is saved when it has been written"
    assert kills > 3


def test_a_summary_that_is_killed_takes_no_step_again_that_was_saved(tiny_model_dir, tmp_path):
    (book := tmp_path / "book.txt").write_text(BOOK)
    ask = ("summarize", book, "-n", "24")
    expected = Runs(tiny_model_dir, tmp_path / "other", *ask).whole()
    runs, there = Runs(tiny_model_dir, tmp_path, *ask), set()
    for _ in range(KILLS):
        written = "".join(runs.killed("part", 0.3))
        parts = {path: path.read_bytes() for path in (tmp_path / "home" / "parts").glob("*.json")}
        if expected.strip() in written or (there and not parts):
            break  # it had ended, or nearly, and removes its parts
        assert there <= set(parts), "a saved part is kept"
        assert all(isinstance(json.loads(data)["text"], str) for data in parts.values())
        there = set(parts)
    assert there, "no part was finished between two kills"
    assert runs.whole() == expected
    assert not list((tmp_path / "home" / "parts").glob("*.json"))


def test_a_batch_that_is_killed_goes_on_after_what_it_has_written(endless_model_dir, tmp_path):
    """A request that fails is asked again by each run, and never counts as finished."""
    requests = [{"id": number, "prompt": question} for number, question in enumerate(QUESTIONS)]
    requests.insert(3, {"id": "wrong", "prompt": "x" * 100_000})  # longer than the context
    (batch := tmp_path / "batch.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))

    def results(path):
        """The results that are whole lines, and how many of the wrong request's failures."""
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        events = [json.loads(line) for line in lines]
        done = {event["id"]: event["text"] for event in events if event["type"] == "result"}
        assert len(done) == sum(event["type"] == "result" for event in events), "no result is written twice"
        return done, sum(event["type"] == "error" for event in events)

    def command(path):
        return "generate", "--batch", batch, "--output", path, "-n", "40"

    def run(path):  # one request fails, so the run does
        with suppress(subprocess.CalledProcessError):
            Runs(endless_model_dir, tmp_path, *command(path)).whole()
        return results(path)

    expected, failures = run(tmp_path / "whole")
    assert (len(expected), failures) == (len(QUESTIONS), 1)
    path, there = tmp_path / "results", {}
    runs = Runs(endless_model_dir, tmp_path, *command(path), "--verbose")
    for _ in range(KILLS):
        runs.killed("", 6)
        found, failures = results(path)
        assert there.items() <= found.items() <= expected.items()
        there = found
    found, after = run(path)
    assert found == expected
    assert after == failures + 1
