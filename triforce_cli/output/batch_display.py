"""Progress of several sequences that run together: one line on stderr for all, and their statistics."""

import time

from rich.text import Text

from offload.events import Event
from offload.metrics import Meter
from offload.units import counted

from .format import duration, rate, time_left
from .progress import ProgressDisplay, RunFacts
from .tables import SEPARATOR, Segment, fitted
from .terminal import Terminal


class BatchDisplay(ProgressDisplay):
    """A status line for all sequences: `3 of 12 done · 1:20 left · 4 running · 3,110 tokens · 35/s`.

    Attributes:
        failed: sequences, of those done, that have an error in the place of a text.
    """

    def __init__(self, terminal: Terminal, shown: bool = True, has_file: bool = False) -> None:
        """`has_file`: all texts go to a file."""
        super().__init__(terminal, shown)
        self._running: list[Meter] = []
        # Text that comes back to the screen through a pipe cannot be drawn around.
        self._may_draw = has_file or terminal.stdout_is_terminal or not terminal.text_may_show
        self.failed = 0
        self._known = self._done = self._skipped = self._tokens = self._read = 0
        self._started_at: float | None = None  # when the first sequence began

    def expect(self, count: int) -> None:
        """Count sequences that are known to follow."""
        self._known += count

    def skip(self) -> None:
        """Count one as done that an earlier run has finished."""
        self._done += 1
        self._skipped += 1

    def fail(self, has_run: bool) -> None:
        """Count an error: of a sequence that has ended, or of one that could not run."""
        self.failed += 1
        self._done += not has_run

    def count(self, new_tokens: int, prompt_tokens: int) -> None:
        """Count a sequence as done."""
        self._started_at = self._started_at or time.monotonic()
        self._done += 1
        self._tokens += new_tokens
        self._read += prompt_tokens
        self._show()

    def end(self, meter: Meter) -> None:
        """Count a sequence as done, whose events `meter` has observed."""
        self._running = [running for running in self._running if running is not meter]
        self.count(meter.new_tokens, 0 if meter.finish_reason is None else meter.prompt_tokens)

    @property
    def results(self) -> int:
        """Sequences that are done and have a text."""
        return self._done - self.failed

    def start(self, facts: RunFacts) -> None:
        self._started_at = self._started_at or time.monotonic()
        self._running.append(facts.meter)

    def event(self, event: Event) -> None:
        self._show()

    def _show(self) -> None:
        if self._may_draw:
            self.status(self.line)

    def statistics(self, how: str) -> str:
        """Return what was done in one line, which ends with `how`: how many ran together."""
        seconds = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        speed = f" at {rate(self._tokens / seconds)}" if self._tokens and seconds > 0 else ""
        failed = f", {self.failed:,} failed" if self.failed else ""
        done, read = f"{counted(self.results, 'request')} done{failed}", f"{counted(self._read, 'token')} read"
        return SEPARATOR.join([done, read, f"{self._tokens:,} written in {duration(seconds)}{speed}", how])

    def line(self) -> Text:
        """Return the status line."""
        seconds = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        tokens = self._tokens + sum(meter.new_tokens for meter in self._running)
        segments = [Segment(f"{self._done} of {self._known} done", "bold")]
        if self.failed:
            segments.append(Segment(f"{self.failed:,} failed", "red"))
        if (generated := self._done - self._skipped) and seconds:  # the others may take as long
            segments.append(Segment(time_left(seconds / generated * (self._known - self._done)), "cyan"))
        segments += [Segment(f"{len(self._running)} running"), Segment(counted(tokens, "token"), dropped=1)]
        if tokens and seconds:
            segments.append(Segment(rate(tokens / seconds), "cyan", dropped=1))
        return fitted(segments, self._terminal.size()[0] - 1)
