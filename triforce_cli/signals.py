"""How the process ends: its exit codes, and handlers of signals. Imports nothing heavy: Ctrl-C works from the start.

The first Ctrl-C raises KeyboardInterrupt, which ends what is under way and keeps what there is. A second one ends the
process at once, also within a native call that holds the interpreter's lock: interrupt.c counts them in the signal
itself. Where that library is not built, a second one ends the process as soon as Python answers signals."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import CodeType, FrameType

DONE = 0  # also when the reader of a pipe has closed it
FAILED = 1  # while running
WRONG_USE = 2
INTERRUPTED = 130  # Ctrl-C
SIGNALLED = 128  # + the number of any other signal


_SHOW_CURSOR = b"\x1b[?25h\n"  # and begin a line for the shell's prompt
_TORCH_STORAGE = os.path.join("torch", "storage.py")
_REDELIVERY = 0.01  # seconds
_MERGED = 0.1  # seconds in which two signals are one: `timeout` and other wrappers send it twice
_first_at: float | None = None  # when the Ctrl-C that has not been answered came
_is_exiting = False


def listen() -> None:
    """Install the handlers of the signals that end a process; with SIGHUP ignored, as by nohup, it stays so."""
    answered()
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _deliver_lost
    if (library := _library()) is not None:
        library.interrupt_listen(INTERRUPTED, ctypes.c_double(_MERGED))
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        if hasattr(signal, name) and not (name == "SIGHUP" and is_ignored(signal.SIGHUP)):
            signal.signal(getattr(signal, name), _terminate)


def ignore_signals() -> None:
    """Answer no signal any more but a second Ctrl-C: what is left to do is short, such as removing files."""
    global _is_exiting
    _is_exiting = True


def answered() -> None:
    """Count the next Ctrl-C as a first one: what the last one asked for is done, and the program goes on."""
    global _first_at
    _first_at = None
    if (library := _library()) is not None:
        library.interrupt_answered()


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library of interrupt.c; None where it was not built, as without a C compiler."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        try:
            return ctypes.CDLL(str(folder / f"_interrupt{suffix}"))
        except OSError:
            continue
    return None


def is_ignored(number: int) -> bool:
    """Return whether a signal is ignored, as the parent process has asked for."""
    return signal.getsignal(number) == signal.SIG_IGN


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import exit at once, since it may be caught there or leave half a module."""
    global _first_at
    if _is_importing(frame):
        _exit_at_once(INTERRUPTED)
    if _first_at is not None:
        if time.monotonic() - _first_at > _MERGED:
            _exit_at_once(INTERRUPTED)
        return
    if _must_wait(frame):
        _deliver_again(number)
    else:
        _first_at = time.monotonic()
        if not _is_exiting:
            raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, so that the status line and partly fetched files are removed; during an import exit at once."""
    if _is_importing(frame):
        _exit_at_once(SIGNALLED + number)
    if _must_wait(frame):
        _deliver_again(number)
    elif not _is_exiting:
        raise SystemExit(SIGNALLED + number)


def _must_wait(frame: FrameType | None) -> bool:
    """Return whether an exception would be lost now: callers of torch's storage code in Rust replace it by their own.

    A loaded machine may also deliver a signal again while the first one's loss is still being handled.
    """
    lost = _deliver_lost.__code__
    return _is_below(frame, lambda code: code is lost or code.co_filename.endswith(_TORCH_STORAGE))


def _deliver_again(number: int) -> None:
    """Send the signal to the main thread again a little later, when other code is running there.

    Sent to that thread, it interrupts a system call that would otherwise block until its end, such as a sleep.
    """
    answered()
    timer = threading.Timer(_REDELIVERY, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    timer.start()


def _deliver_lost(lost: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception could not be raised, as in a destructor: Python would only print it."""
    code = getattr(lost.exc_value, "code", None)
    if isinstance(lost.exc_value, KeyboardInterrupt):
        _deliver_again(signal.SIGINT)
    elif isinstance(lost.exc_value, SystemExit) and isinstance(code, int) and code > SIGNALLED:
        _deliver_again(code - SIGNALLED)
    else:
        sys.__unraisablehook__(lost)


def _exit_at_once(code: int) -> None:
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
    if (files := sys.modules.get("offload.system.files")) is not None and hasattr(files, "remove_temporaries"):
        files.remove_temporaries()
    os._exit(code)


def _is_importing(frame: FrameType | None) -> bool:
    return _is_below(frame, lambda code: code.co_filename.startswith("<frozen importlib"))


def _is_below(frame: FrameType | None, is_wanted: Callable[[CodeType], bool]) -> bool:
    """Return whether code that is wanted is running, or called what is running."""
    while frame is not None:
        if is_wanted(frame.f_code):
            return True
        frame = frame.f_back
    return False
