"""Ctrl-C, SIGTERM and closed pipes: what ends, with which exit code, and what is kept."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest

from tests.support.command import COMMAND, environment, start, wait_for_the_first_line
from triforce_cli.signals import listen

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def listening():
    """The command's handlers, undone after the test."""
    before = [signal.getsignal(number) for number in NUMBERS]
    listen()
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


class Output(io.StringIO):
    """A stdout that does something once, when it has got the first text."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def write(self, text):
        count = super().write(text)
        if '"type": "text"' in text:
            act, self.act = self.act, lambda: None
            act()
        return count


def closed():
    raise BrokenPipeError


@pytest.mark.parametrize(
    ("act", "code", "end"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130, "done"),
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "text"),
        (closed, 0, "text"),
    ],
    ids=["Ctrl-C", "SIGTERM", "closed pipe"],
)
def test_what_ends_a_text_has_its_exit_code_and_leaves_whole_lines(
    triforce_here, endless_model_dir, listening, act, code, end
):
    output = Output(act)
    with patch.object(sys, "stdout", output):
        answer = triforce_here("generate", "Once", "-n", "50", "--json", "--model", endless_model_dir)
    events = [json.loads(line) for line in output.getvalue().splitlines()]
    assert (answer.returncode, events[-1]["type"]) == (code, end)
    assert "Traceback" not in answer.stderr
    if code == 130:
        assert events[-1]["finish_reason"] == "interrupted" and "interrupted" in answer.stderr
        assert events[-1]["new_tokens"] == events[-2]["tokens"] < 50
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # the second one ends the process


def test_an_output_file_keeps_the_text_so_far(triforce_here, endless_model_dir, listening, tmp_path, monkeypatch):
    written = []

    def interrupt(self, event):
        written.append(event)
        if len(written) == 6:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("triforce_cli.output.progress.ProgressDisplay.event", interrupt)
    (path := tmp_path / "answer.txt").write_text("old")
    answer = triforce_here("generate", "Once", "-n", "50", "-o", path, "--model", endless_model_dir)
    assert answer.returncode == 130
    assert path.read_text() not in ("", "old")


def test_a_signal_before_the_command_has_begun_ends_quietly(tmp_path):
    """As a module and within an exec, as in the import of a dataclass: there the interpreter would kill itself."""
    (tmp_path / "interrupted.py").write_text(
        "from triforce_cli import app, entry\n"
        "app.run = lambda args: exec('import signal; signal.raise_signal(signal.SIGINT)')\nentry.main()"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.long
def test_a_closed_pipe_and_sigterm_end_the_process_quietly(endless_model_dir, tmp_path):
    for close, code in ((True, 0), (False, 128 + signal.SIGTERM)):
        with start(endless_model_dir, tmp_path) as process:
            assert process.stdout.read(20)
            process.stdout.close() if close else process.terminate()
            assert process.wait(60) == code
            assert process.stderr.read() == b""


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6, 1.2, 2.5])
def test_ctrl_c_while_starting_is_quiet(endless_model_dir, tmp_path, delay):
    with start(endless_model_dir, tmp_path) as process:
        wait_for_the_first_line(process)
        time.sleep(delay)  # the moment is the point: imports, opening, loading
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_an_error(tiny_model_dir, tmp_path):
    with open("/dev/full", "w") as full:
        command, env = [*COMMAND, "profile", "--gpu", "cpu"], environment(tmp_path, tiny_model_dir)
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: No space left on device")
