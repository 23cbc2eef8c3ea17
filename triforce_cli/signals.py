"""How the process ends: its exit codes, and handlers of signals. Imports nothing heavy: Ctrl-C works from the start."""

import signal
from types import FrameType

from offload.system.platform import END_SIGNALS

DONE = 0  # also when the reader of a pipe has closed it
FAILED = 1  # while running
WRONG_USE = 2
INTERRUPTED = 130  # Ctrl-C
SIGNALLED = 128  # + the number of any other signal


def listen() -> None:
    """Let the first signal that ends a process end what is under way and keep the text so far; a second one ends it.

    To be called again when an interrupt has been answered and the program goes on. With SIGHUP ignored, as by nohup, it
    stays so.
    """
    signal.signal(signal.SIGINT, _interrupt)
    for number in END_SIGNALS:
        if number == signal.SIGTERM or not is_ignored(number):
            signal.signal(number, _terminate)


def is_ignored(number: int) -> bool:
    """Return whether a signal is ignored, as the parent process has asked for."""
    return signal.getsignal(number) == signal.SIG_IGN


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once, in native code too
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(SIGNALLED + number)
