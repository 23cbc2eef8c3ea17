"""The progress of a batch on stderr: one status line, and one line of statistics at the end."""

from __future__ import annotations

import time

from rich.text import Text

from offload.events import Event, Prefilled, Tokens
from offload.units import counted

from .format import duration, rate, time_left
from .progress import ProgressDisplay
from .segments import Segment, fitted
from .terminal import Terminal
from .wrapping import SEPARATOR


class BatchProgress:
    """Counts what happens to the requests of a batch, and shows it where stderr is a terminal.

    Attributes:
        done, failed: requests that have a result of this run, or an error.
        display: shows loading too.
    """

    def __init__(self, terminal: Terminal, quiet: bool, to_file: bool) -> None:
        """`to_file`: results do not go to stdout, and cannot come back to the screen through a pipe."""
        self.display = ProgressDisplay(terminal, shown=not quiet)
        self._terminal = terminal
        self._drawable = to_file or terminal.stdout_is_terminal or not terminal.text_may_show
        self.done = self.failed = 0
        self._total = 0
        self._prompts: dict[int, int] = {}  # tokens to be read, of the sequences that have not written any
        self._running: set[int] = set()
        self._read = self._written = 0  # tokens
        self._began = time.perf_counter()

    def start(self, total: int) -> None:
        """Begin to measure: the model is loaded, and so many requests are to be answered."""
        self._total, self._began = total, time.perf_counter()
        self.display.hide()

    def event(self, key: int, event: Event) -> None:
        """Count an event of a sequence, and redraw."""
        self._running.add(key)
        if isinstance(event, Prefilled):
            self._prompts[key] = event.total - event.done
        elif isinstance(event, Tokens):
            self._prompts.pop(key, None)
            self._written += len(event.ids)
        if self._drawable:
            self.display.status(self._status)

    def finished(self, key: int, prompt_tokens: int) -> None:
        """Count a sequence that has a result."""
        self.done += 1
        self._read += prompt_tokens
        self._end(key)

    def failed_at(self, key: int) -> None:
        """Count a request that has an error."""
        self.failed += 1
        self._end(key)

    def statistics(self, mean: float, most: int) -> str:
        """Return what this run has done in one line; `mean` and `most` sequences ran together."""
        seconds = time.perf_counter() - self._began
        speed = f" at {rate(self._written / seconds)}" if self._written and seconds > 0 else ""
        return SEPARATOR.join(
            [
                f"{counted(self.done, 'request')} done" + (f", {self.failed:,} failed" if self.failed else ""),
                f"{counted(self._read, 'token')} read",
                f"{self._written:,} written in {duration(seconds)}{speed}",
                f"{mean:.1f} sequences together, {most} at most",
            ]
        )

    def _end(self, key: int) -> None:
        self._running.discard(key)
        self._prompts.pop(key, None)

    def _status(self) -> Text:
        seconds = time.perf_counter() - self._began
        ended = self.done + self.failed
        waiting = sum(self._prompts.values())
        segments = [
            Segment("batch", "bold"),
            Segment(f"{ended:,}/{self._total:,} done"),
            *([Segment(f"{self.failed:,} failed", "red")] if self.failed else []),
            Segment(f"{len(self._running)} running", dropped=1),
            *([Segment(time_left(seconds / ended * (self._total - ended)), "cyan", dropped=1)] if ended else []),
            Segment(rate(self._written / seconds) if self._written and seconds > 0 else "…/s", "cyan"),
            *([Segment(f"{counted(waiting, 'token')} to read", dropped=2)] if waiting else []),
        ]
        return fitted(segments, self._terminal.size()[0] - 1)
