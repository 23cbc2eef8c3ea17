"""Signals that come at a moment when an exception would be lost."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triforce_cli import entry, signals


@pytest.fixture
def listening():
    """The command's handlers, undone after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    hook = sys.unraisablehook
    signals.listen()
    yield
    sys.unraisablehook = hook
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_safetensors_reads_is_answered_behind_it(tmp_path, monkeypatch, listening, number, raised):
    """Safetensors asks torch's storage for a slice; an exception from there would become a ValueError."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0)}, path)
    found, signals_left, sliced = [], [number], torch.storage.UntypedStorage.__getitem__

    def interrupted(storage, *args):
        if signals_left:
            (lambda: signal.raise_signal(signals_left.pop()))()  # torch's storage may have called something else
        return sliced(storage, *args)

    # The handler sees the file of the code that runs, which is torch's own but for this test.
    code = interrupted.__code__.replace(co_filename=torch.storage.__file__)
    interrupted.__code__ = code
    monkeypatch.setattr(torch.storage.UntypedStorage, "__getitem__", interrupted)

    start = time.monotonic()

    def read():
        with safe_open(path, framework="pt") as file:
            found.append(file.get_tensor("weight"))
        time.sleep(60)

    with pytest.raises(raised):
        read()
    assert time.monotonic() - start < 30, "the signal did not interrupt what blocked"
    assert torch.equal(found[0], torch.arange(6.0))


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_an_object_is_deleted_is_answered_behind_it(listening, number, raised):
    """Python drops what a destructor raises."""

    class Deleted:
        def __del__(self):
            signal.raise_signal(number)

    def delete():
        Deleted()
        time.sleep(60)

    with pytest.raises(raised):
        delete()


@pytest.mark.parametrize("error", [ValueError("lost"), SystemExit("lost"), SystemExit(1)])
def test_another_error_of_a_destructor_is_printed(listening, capsys, error):
    class Deleted:
        def __del__(self):
            raise error

    Deleted()
    printed = capsys.readouterr().err
    assert printed.strip().endswith(f"{type(error).__name__}: {error}") and "unraisablehook" not in printed


ENDING = """
import atexit, os, signal, sys, threading
sys.modules.setdefault("torch", threading) if {torch} else None
from triforce_cli import app, entry

def send():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    os.write(1, b"removed")

atexit.register(send)
app.run = lambda args: 7
entry.main()
"""


@pytest.mark.parametrize("torch", [True, False])
def test_a_signal_while_a_process_ends_keeps_it_from_nothing(torch):
    """What is registered to be done then removes temporary files."""
    done = subprocess.run([sys.executable, "-c", ENDING.format(torch=torch)], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"removed", b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_threads_are_waited_for_ends_the_process(monkeypatch, listening, number, code):
    ended = []
    monkeypatch.setattr(entry.threading, "_shutdown", lambda: signal.raise_signal(number))
    monkeypatch.setattr(entry.atexit, "_run_exitfuncs", lambda: ended.append("files"))
    monkeypatch.setattr(entry.os, "_exit", ended.append)
    monkeypatch.setattr(signals, "_is_exiting", False)
    entry.exit_without_teardown(0)
    assert ended == ["files", code]


def test_a_signal_while_the_handlers_are_installed_ends_the_process_quietly(monkeypatch, listening, capsys):
    monkeypatch.setattr(signals, "_library", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(entry, "exit_without_teardown", lambda code: None)
    monkeypatch.setattr(signals, "_is_exiting", False)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_signal_that_is_delivered_again_too_soon_waits(monkeypatch, listening):
    """On a loaded machine it may come while its own loss is being handled."""
    again = []

    def deliver_again(number):
        again.append(number)
        signals.answered()
        if len(again) == 1:
            signal.raise_signal(number)

    class Deleted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(signals, "_deliver_again", deliver_again)
    Deleted()
    assert again == [signal.SIGINT] * 2
