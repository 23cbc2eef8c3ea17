"""Where the `triforce` command begins. Imports nothing heavy: Ctrl-C must be answered from the first moment on."""

from __future__ import annotations

import sys

from .exit_codes import INTERRUPTED
from .signals import listen


def main() -> None:
    """The `triforce` on the PATH."""
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
