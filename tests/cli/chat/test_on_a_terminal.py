"""`triforce chat` on a pseudo-terminal: the prompt, Ctrl-C, Ctrl-D, and a terminal that can do nothing."""

import json
import os
import re
import signal
import sys
import termios
import threading
import time
from unittest.mock import patch

import pyte
import pytest

from tests.support.terminal import Pty
from triforce_cli.app import run
from triforce_cli.run.generation import Generation

COLUMNS, ROWS = 100, 80
INTERRUPT = "<interrupt>"


class Typist(threading.Thread):
    """Types each text as soon as the screen shows what comes before it in the step; INTERRUPT at its end is SIGINT."""

    def __init__(self, pty, *steps):
        super().__init__(daemon=True)
        self._pty, self._steps = pty, steps
        self._screen, self._read = pyte.Screen(COLUMNS, ROWS), 0
        self._stream = pyte.ByteStream(self._screen)
        self.missing = ""

    def run(self):
        for awaited, text in self._steps:
            until = time.monotonic() + 60
            while not self._has_shown(awaited):
                if time.monotonic() > until:
                    self.missing = awaited
                    self._pty.type("\x03\x04")  # leaves, so that the test ends
                    return
                time.sleep(0.05)
            self._pty.type(text.removesuffix(INTERRUPT))
            if text.endswith(INTERRUPT):
                self._wait_for_output()  # what is typed before it arrives before it
                os.kill(os.getpid(), signal.SIGINT)

    def _wait_for_output(self):
        """Wait until the status line is drawn twice: echo is off, and without a whole line FIONREAD counts nothing."""
        for _ in range(2):
            before, until = len(self._pty.written()), time.monotonic() + 60
            while len(self._pty.written()) == before and time.monotonic() < until:
                time.sleep(0.005)

    def _has_shown(self, awaited):
        """Whether it is on the screen, or in what was written since the last step: a status line comes and goes."""
        since = self._read
        lines = self.shown()
        written = self._pty.written()[since : self._read].decode(errors="replace")
        return any(re.search(awaited, text, re.DOTALL) for text in (lines, written))

    def shown(self):
        """Return what is on the screen now."""
        written = self._pty.written()
        self._stream.feed(written[self._read :])
        self._read = len(written)
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()


@pytest.fixture
def at_a_terminal(triforce_here, endless_model_dir, interruptible):
    """Return a function that chats while somebody types; it returns the exit code and the screen at the end."""

    def call(*steps, args=(), term="xterm-256color"):
        pty = Pty(COLUMNS, ROWS)
        typist = Typist(pty, *steps)
        out, source = pty.stream(), pty.stream("r")
        before = termios.tcgetattr(source)
        streams = [
            patch.object(sys, name, each) for name, each in (("stdin", source), ("stdout", out), ("stderr", out))
        ]
        with streams[0], streams[1], streams[2], patch.dict(os.environ, {"TERM": term, "NO_COLOR": "1"}):
            typist.start()
            code = run(["chat", "--model", str(endless_model_dir), *map(str, args)])
        typist.join(60)
        shown = typist.shown()
        assert not typist.missing, f"{typist.missing!r} was not shown: {shown}"
        assert termios.tcgetattr(source)[3] == before[3], "the terminal no longer echoes"
        return code, shown

    return call


PROMPT = "> +context [0-9,]+/2,048.*/help$"


@pytest.fixture
def slowly(monkeypatch):
    """Let an answer of 1,500 tokens take 30 s or more: somebody types before its end, however busy the machine is."""
    generate = Generation.events

    def generated(*args):
        for event in generate(*args):
            time.sleep(0.02)
            yield event

    monkeypatch.setattr(Generation, "events", generated)


@pytest.mark.long
def test_ctrl_c_keeps_what_was_said_and_ctrl_d_leaves(at_a_terminal, slowly, tmp_path):
    path = tmp_path / "saved.json"
    code, shown = at_a_terminal(
        (PROMPT, "Tell me a stroy\x1b[D\x7f\x7for"),  # the cursor keys and backspace edit it
        ("Tell me a story", "\r"),
        (r"Tell me a story .*/help\s+\S+", "typed meanwhile" + INTERRUPT),  # the answer has begun
        ("· interrupted\n> typed meanwhile ", "\x15\x1b[A"),  # instead, the line before
        ("Tell me a story.*Tell me a story", "\x03"),
        ("Ctrl-D or /exit leaves\n> ", "/he\t"),
        ("> /help", "\r"),
        ("Ctrl-D leaves\\.", f"/save {path}\r"),
        ("saved in", "\x04"),
        args=("-n", "1500", "--temperature", "1", "--seed", "1"),
    )
    assert code == 0
    assert "decode ·" not in shown  # the status line is erased
    assert "typed" not in shown.partition("interrupted")[0]
    (turn,) = json.loads(path.read_text())["turns"]
    assert turn["question"] == "Tell me a story" and 1 <= len(turn["ids"]) < 1500
    assert (tmp_path / "home" / "chat_history").stat().st_mode & 0o777 == 0o600
