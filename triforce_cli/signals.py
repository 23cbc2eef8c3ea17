"""Answers the signals that end a process. Imports nothing heavy: Ctrl-C must be answered from the first moment on."""

from __future__ import annotations

import os
import signal
from types import FrameType

from .exit_codes import INTERRUPTED, SIGNALLED

_SHOW_CURSOR = b"\x1b[?25h"


def listen() -> None:
    """Answer the signals that end a process."""
    signal.signal(signal.SIGINT, _interrupt)
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _terminate)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt, but not into an import: there it may be swallowed, or leave half a module behind."""
    if not _is_importing(frame):
        raise KeyboardInterrupt
    _leave_at_once(INTERRUPTED)


def _terminate(number: int, frame: FrameType | None) -> None:
    """An exit that takes the status bar and half-fetched files with it."""
    if not _is_importing(frame):
        raise SystemExit(SIGNALLED + number)
    _leave_at_once(SIGNALLED + number)


def _leave_at_once(code: int) -> None:
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
    os._exit(code)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
