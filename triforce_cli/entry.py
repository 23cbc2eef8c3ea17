"""The entry point of the `triforce` command. Imports nothing heavy: Ctrl-C must work from the start."""

import atexit
import os
import sys
import threading
from contextlib import suppress

from offload.system.platform import enable_escapes

from .signals import DONE, INTERRUPTED, listen


def main() -> None:
    """Run the command line and exit with its code."""
    code = INTERRUPTED
    with suppress(KeyboardInterrupt):  # before the command has begun, or after its end
        listen()
        enable_escapes()
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the shell: >&-
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        from .app import run, settle_libraries
        from .distributed.rank import finish

        settle_libraries()
        code = run(sys.argv[1:])
        finish(code)
    exit_without_teardown(code)


def exit_without_teardown(code: int) -> None:
    """End the process as the interpreter does, but do not free its objects one by one.

    After a model was loaded, freeing takes up to half a second, and the system frees all memory anyway. The interpreter
    would also replace `code`: an interrupt within an `exec` of source, as in each import of a dataclass, makes it kill
    itself by SIGINT at the end, although the interrupt was caught.
    """
    try:
        vars(threading)["_shutdown"]()  # waits for threads that write prompts; unknown to type checkers
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as exit_:  # SIGTERM
        code = int(exit_.code or DONE)
    os._exit(code)
