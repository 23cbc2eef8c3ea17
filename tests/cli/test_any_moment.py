"""Ctrl-C at random moments of a command, in this process: nothing half-written, nothing lost, and no other error."""

import json
import os
import random
import re
import signal
import sys
import threading
import time

import pytest

from offload.system.files import TEMPORARY, remove_temporaries
from triforce_cli import signals

pytestmark = pytest.mark.long
MOMENTS = 30
BOOK = "\n\n".join(f"Chapter {i}. The cat went to the {i}th house and said what it had seen there." for i in range(150))
COMMANDS = {
    "text": ("generate", "Once", "-n", "300", "-o", "out.txt"),
    "events": ("generate", "Once", "-n", "200", "--json"),
    "chat": ("chat", "-n", "60", "--session", "saved.json", "--json"),
    "batch": ("generate", "--batch", "lines.jsonl", "-n", "60", "--parallel", "2", "-o", "results.jsonl"),
    "parts": ("summarize", "book.txt", "--map-reduce", "-n", "24"),
    "parts together": ("summarize", "book.txt", "--map-reduce", "-n", "24", "--parallel", "2"),
    "cache": ("generate", "-f", "book.txt", "--truncate", "end", "Once", "-n", "30", "--raw", "--cache"),
    "bench": (
        "bench",
        BOOK[:800],
        "--methods",
        "lookup",
        "--context",
        "20,40",
        "--new",
        "8",
        "--points",
        "points.jsonl",
    ),
}


class AtOnce(BaseException):
    """In place of the process's end, where the signal falls into an import."""


@pytest.fixture
def interrupted(triforce_here, endless_model_dir, tmp_path, monkeypatch):
    """Return a function that runs a command and interrupts it after some seconds: its result, None if it ended at once.

    It returns the seconds that the command took, too.
    """

    def leave(code):
        raise AtOnce

    is_running = False

    def answer(number, frame):
        if is_running:
            signals._interrupt(number, frame)

    def call(args, seconds):
        nonlocal is_running
        signals.answered()
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        begun, result = time.monotonic(), None
        timer.start()
        try:
            try:
                is_running = True
                result = triforce_here(*args, "--model", endless_model_dir, stdin=b"Who?\nWhen?\nWhere?\n")
            finally:
                is_running = False
        except (AtOnce, KeyboardInterrupt):
            is_running = False
        timer.cancel()
        timer.join()
        return result, time.monotonic() - begun

    monkeypatch.setattr(signals, "_exit_at_once", leave)
    monkeypatch.setattr(sys, "unraisablehook", signals._deliver_lost)
    before = signal.signal(signal.SIGINT, answer)
    yield call
    signal.signal(signal.SIGINT, before)


def check(result, folder):
    """Check what a command has left that was interrupted."""
    code, out, err = result
    assert code in (0, 130), err  # 0: it had ended
    assert "Traceback" not in err and "Exception ignored" not in err and "bug" not in err
    files = {path.name: path for path in folder.rglob("*") if path.is_file()}
    for name in {"results.jsonl", "points.jsonl"} & files.keys():
        text = files[name].read_text()
        assert all(json.loads(line) for line in text.splitlines()) and (not text or text.endswith("\n"))
    if out.startswith("{"):
        events = [json.loads(line) for line in out.splitlines()]
        ended = sum(event["type"] == "done" for event in events if event.get("finish_reason") != "interrupted")
        answers = json.loads(files["saved.json"].read_text())["turns"] if "saved.json" in files else []
        assert out.endswith("\n") and ("question" not in out or len(answers) >= ended)
    if (written := re.search(r"(\d+) written", err)) and int(written[1]) > 3 and "out.txt" in str(files):
        assert files["out.txt"].stat().st_size
    if list((folder / "home" / "parts").glob("*.json")) and "written at" in err and code and not out:
        assert "the finished parts are saved" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment(interrupted, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    def run(seconds):
        for path in tmp_path.rglob("*"):
            if path.is_file():
                path.unlink()
        (tmp_path / "book.txt").write_text(BOOK)
        (tmp_path / "lines.jsonl").write_text("".join(f'{{"id": {n}, "prompt": "Once {n}"}}\n' for n in range(4)))
        return interrupted(COMMANDS[name], seconds)

    (first, _), (second, whole) = run(600), run(600)
    assert first.returncode == second.returncode == 0, first.stderr
    rng = random.Random(name)
    for _ in range(MOMENTS):
        result, _ = run(rng.uniform(0, whole))
        if result is not None:
            check(result, tmp_path)
        remove_temporaries()  # as at the process's end
        assert not list(tmp_path.rglob(f"{TEMPORARY}*"))
