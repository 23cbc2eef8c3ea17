"""A second Ctrl-C ends the process at once, whatever it is doing; processes of their own, some on a terminal."""

import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.command import COMMAND, environment
from tests.support.terminal import Pty
from tests.support.waiting import until
from triforce_cli import signals

needs_library = pytest.mark.skipif(signals._library() is None, reason="interrupt.c was not built")

NATIVE = "sum(range(10**12))"  # keeps the interpreter's lock, and answers no signal
LOOP = """
while True:
    try:
        os.write(1, b"sleeping\\n")
        time.sleep(600)
    except KeyboardInterrupt:
        if IS_ANSWERED:
            answered()
        os.write(1, b"answered\\n")
"""
PROGRAM = """
import os, signal, sys, time
from triforce_cli import signals
from triforce_cli.signals import answered, listen
IS_ANSWERED = False
signals._MERGED = float(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"alive\\n"))
listen()
os.write(1, b"ready\\n")
"""


def run_until_ready(program, merged=0.0, **streams):
    """Return a process that is about to sleep or compute; within `merged` seconds two signals are one."""
    command = [sys.executable, "-c", PROGRAM + program, str(merged)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **streams)
    assert process.stdout.readline() == b"ready\n"
    return process


def wait_until_it_sleeps(process):
    assert process.stdout.readline() == b"sleeping\n"  # or is about to: what comes is caught


def wait_until_it_computes(process):
    cpu_times = psutil.Process(process.pid).cpu_times
    before = cpu_times().user
    until(lambda: cpu_times().user > before + 0.03)  # in native code: what comes before takes microseconds


def interrupt(process):
    """Send SIGINT, and wait until it was delivered: two that are pending would be one."""
    process.send_signal(signal.SIGINT)
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        time.sleep(0.15)
        return
    pending = re.compile(r"^(?:SigPnd|ShdPnd):\s*(\w+)", re.MULTILINE)
    until(lambda: not any(int(found, 16) >> (signal.SIGINT - 1) & 1 for found in pending.findall(status.read_text())))


@needs_library
@pytest.mark.parametrize(
    ("program", "wait"), [(NATIVE, wait_until_it_computes), (LOOP, wait_until_it_sleeps)], ids=["native", "swallowed"]
)
def test_a_second_ctrl_c_ends_a_native_call_that_keeps_the_lock(program, wait):
    with run_until_ready(program, stderr=subprocess.PIPE) as process:
        wait(process)
        interrupt(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.15)
        interrupt(process)
        assert process.wait(60) == 130
        assert process.stderr.read() == b""


def test_one_ctrl_c_that_is_sent_twice_is_one():
    """`timeout` signals the process, and then its group."""
    with run_until_ready(LOOP, merged=600) as process:
        wait_until_it_sleeps(process)
        interrupt(process)
        assert process.stdout.readline() == b"answered\n"
        wait_until_it_sleeps(process)
        interrupt(process)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == b"alive\n"
        process.kill()


def test_a_ctrl_c_after_one_that_was_answered_is_a_first_one():
    with run_until_ready("IS_ANSWERED = True\n" + LOOP) as process:
        for _ in range(3):
            wait_until_it_sleeps(process)
            interrupt(process)
            assert process.stdout.readline() == b"answered\n"
        process.kill()


@needs_library
def test_the_terminal_is_as_it_was_after_a_second_ctrl_c():
    pty = Pty(80, 24)
    stream = pty.stream()
    before = termios.tcgetattr(stream)
    program = "import sys, termios\nm = termios.tcgetattr(2); m[3] &= ~termios.ECHO; termios.tcsetattr(2, 0, m)\n"
    program += "sys.stderr.write('\\x1b[?25l'); sys.stderr.flush()\n" + NATIVE
    with run_until_ready(program, stderr=stream) as process:
        until(lambda: b"\x1b[?25l" in pty.written())
        assert termios.tcgetattr(stream) != before
        wait_until_it_computes(process)
        for _ in range(2):
            interrupt(process)
        assert process.wait(60) == 130
    assert termios.tcgetattr(stream) == before
    written = pty.output()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert written.endswith("\n")


def test_the_shell_prompts_on_a_new_line_after_a_ctrl_c_during_an_import(monkeypatch):
    done = []
    system = SimpleNamespace(isatty=lambda _: True, write=lambda *written: done.append(written), _exit=done.append)
    monkeypatch.setattr(signals, "os", system)
    signals._exit_at_once(130)
    assert done == [(2, b"\x1b[?25h\n"), 130]


@pytest.mark.long
@pytest.mark.parametrize("delay", [1.5, 3, 5, 8, 12])
def test_one_ctrl_c_ends_each_phase_of_a_long_document(tiny_model_dir, tmp_path, delay):
    """Reading, encoding for the length and for the parts, prefill, decoding and saving of five megabytes."""
    book, out = tmp_path / "book.txt", tmp_path / "out.txt"
    book.write_text("The cat went to the house by the sea and said what it had seen there.\n" * 70_000)
    command = [*COMMAND, "summarize", str(book), "--map-reduce", "-o", str(out)]
    env = environment(tmp_path, tiny_model_dir)
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        time.sleep(delay)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130  # far more than it takes, and less than a phase
        assert b"Traceback" not in process.stderr.read()
    assert {path.name for path in tmp_path.iterdir()} <= {"book.txt", "home", "out.txt"}  # and nothing half-written
