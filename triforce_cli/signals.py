"""Handlers of the signals that end a process. Imports nothing heavy: Ctrl-C must work from the start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from .exit_codes import INTERRUPTED, SIGNALLED

_SHOW_CURSOR = b"\x1b[?25h"
_TORCH_STORAGE = os.path.join("torch", "storage.py")
_REDELIVERY = 0.01  # seconds


def listen() -> None:
    """Install the handlers of the signals that end a process; with SIGHUP ignored, as by nohup, it stays so."""
    signal.signal(signal.SIGINT, _interrupt)
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        if hasattr(signal, name) and not (name == "SIGHUP" and is_ignored(signal.SIGHUP)):
            signal.signal(getattr(signal, name), _terminate)


def is_ignored(number: int) -> bool:
    """Return whether a signal is ignored, as the parent process has asked for."""
    return signal.getsignal(number) == signal.SIG_IGN


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import exit at once, since it may be caught there or leave half a module."""
    if _is_importing(frame):
        _exit_at_once(INTERRUPTED)
    if _is_called_by_safetensors(frame):
        _deliver_again(number)
    else:
        raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, so that the status line and partly fetched files are removed; during an import exit at once."""
    if _is_importing(frame):
        _exit_at_once(SIGNALLED + number)
    if _is_called_by_safetensors(frame):
        _deliver_again(number)
    else:
        raise SystemExit(SIGNALLED + number)


def _is_called_by_safetensors(frame: FrameType | None) -> bool:
    """Return whether torch's storage code is running: its callers in Rust replace an interrupt by their own error."""
    return _is_below(frame, lambda name: name.endswith(_TORCH_STORAGE))


def _deliver_again(number: int) -> None:
    """Raise the signal again a little later, when other code is running."""
    timer = threading.Timer(_REDELIVERY, signal.raise_signal, (number,))
    timer.daemon = True
    timer.start()


def _exit_at_once(code: int) -> None:
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
    os._exit(code)


def _is_importing(frame: FrameType | None) -> bool:
    return _is_below(frame, lambda name: name.startswith("<frozen importlib"))


def _is_below(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> bool:
    """Return whether a file whose name is wanted is running, or called what is running."""
    while frame is not None:
        if is_wanted(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
