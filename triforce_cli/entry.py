"""The entry point of the `triforce` command. Imports nothing heavy: Ctrl-C must work from the start."""

from __future__ import annotations

import sys

from .exit_codes import INTERRUPTED
from .signals import listen


def main() -> None:
    """Run the command line and exit with its code."""
    listen()
    try:
        from .app import run, settle_libraries
        from .distributed.rank import finish

        settle_libraries()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command has begun
        sys.exit(INTERRUPTED)
    finish(code)
    sys.exit(code)
