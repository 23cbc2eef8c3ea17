"""The entry point of the `triforce` command. Imports nothing heavy: Ctrl-C must work from the start."""

import atexit
import os
import sys
import threading
from contextlib import suppress

from .signals import DONE, INTERRUPTED, ignore_signals, listen


def main() -> None:
    """Run the command line and exit with its code."""
    code = INTERRUPTED
    with suppress(KeyboardInterrupt):  # before the command has begun, or after its end
        listen()
        occupy_closed_streams()
        from .app import run, settle_libraries
        from .distributed.rank import finish

        settle_libraries()
        code = run(sys.argv[1:])
        finish(code)
    if "torch" in sys.modules:
        exit_without_teardown(code)
    ignore_signals()
    sys.exit(code)


def occupy_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed: no file of ours may get their numbers.

    What a library in C prints there would be written into that file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def exit_without_teardown(code: int) -> None:
    """End the process as the interpreter does, but do not free its objects one by one.

    After torch was imported and a model loaded, freeing takes up to half a second, and the system frees all memory
    anyway.
    """
    try:
        threading._shutdown()  # waits for threads that write prompts
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as exit_:  # SIGTERM
        code = int(exit_.code or DONE)
    ignore_signals()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed before the start, or nobody reads it any more
            pass
    os._exit(code)
