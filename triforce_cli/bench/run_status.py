"""Which run of a benchmark is under way, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

from ..output.status_line import StatusLine
from ..output.terminal import Terminal


@contextmanager
def run_status(terminal: Terminal, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text on stderr unless `quiet`, and erase the last one in the end.

    It is drawn once a run: a spinner would take time from what is measured.
    """
    status = StatusLine(terminal)

    def show(text: str) -> None:
        status.clear()
        if not quiet:
            status.refresh(lambda: Text(text))

    try:
        yield show
    finally:
        status.clear()
