"""Progress of several sequences that run together: one line on stderr for all, and their statistics."""

import time
from collections.abc import Sequence

import psutil
from rich.text import Text

from offload.events import Event
from offload.metrics import Meter
from offload.units import GIB, counted

from .format import duration, rate, time_left
from .progress import ProgressDisplay, RunFacts
from .tables import SEPARATOR, Segment, fitted
from .terminal import Terminal

_BETWEEN = "; "  # between the labels of running sequences
_LABELS = 30  # cells that are kept for them


class BatchDisplay(ProgressDisplay):
    """A status line for all sequences: `3 of 12 done · 4 running · reading 1,024/5,000 tokens · 35/s · …`.

    Attributes:
        failed: sequences, of those done, that have an error in the place of a text.
    """

    def __init__(self, terminal: Terminal, shown: bool = True, may_draw: bool = True) -> None:
        """`may_draw`: the line, besides what is shown of loading."""
        super().__init__(terminal, shown)
        self._running: list[RunFacts] = []
        self._allowed = may_draw
        self.failed = 0
        self._known = self._done = self._skipped = self._tokens = self._read = 0
        self._started_at: float | None = None  # when the first sequence began
        self._first_at: float | None = None  # when the first token came
        self._has_open_text = False

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

    @property
    def results(self) -> int:
        """Sequences that are done and have a text."""
        return self._done - self.failed

    def start(self, facts: RunFacts) -> None:
        if self._started_at is None:
            self._started_at = time.monotonic()
        self._running.append(facts)

    def end(self, meter: Meter) -> None:
        """Count a sequence as done, whose events `meter` has observed."""
        self._running = [facts for facts in self._running if facts.meter is not meter]
        self._done += 1
        self._tokens += meter.new_tokens
        self._read += meter.prompt_tokens if meter.finish_reason is not None else 0

    def event(self, event: Event) -> None:
        if self._first_at is None and any(facts.meter.new_tokens for facts in self._running):
            self._first_at = time.monotonic()
        self._draw()

    def _draw(self) -> None:
        if self._shown and self._may_draw:
            self._hide_bar()
            self._status.refresh(self._line)

    def write(self, text: str) -> None:
        if self._terminal.text_may_show and not self._terminal.stdout_is_terminal:
            self._status.clear()  # both would use the same line
        super().write(text)
        self._has_open_text = not text.endswith("\n")

    def hide(self) -> None:
        self._has_open_text = False  # a line of its own follows
        super().hide()

    @property
    def _may_draw(self) -> bool:
        """Return whether no text that comes back through a pipe is on the screen's last line."""
        hidden = self._has_open_text and self._terminal.text_may_show
        return self._allowed and (self._terminal.stdout_is_terminal or not hidden)

    def count(self, new_tokens: int, prompt_tokens: int) -> None:
        """Count a sequence as done that another process has generated."""
        now = time.monotonic()
        self._started_at, self._first_at = self._started_at or now, self._first_at or now
        self._done += 1
        self._tokens += new_tokens
        self._read += prompt_tokens
        self._draw()

    def statistics(self, how: str) -> str:
        """Return what was done in one line, which ends with `how`: how many ran together."""
        seconds = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        speed = f" at {rate(self._tokens / seconds)}" if self._tokens and seconds > 0 else ""
        return SEPARATOR.join(
            [
                f"{counted(self.results, 'request')} done" + (f", {self.failed:,} failed" if self.failed else ""),
                f"{counted(self._read, 'token')} read",
                f"{self._tokens:,} written in {duration(seconds)}{speed}",
                how,
            ]
        )

    def _line(self) -> Text:
        meters = [facts.meter for facts in self._running]
        tokens = self._tokens + sum(meter.new_tokens for meter in meters)
        labels = _BETWEEN.join(facts.label for facts in self._running if facts.label)
        segments = [
            Segment(f"{self._done} of {self._known} done", "bold"),
            *([Segment(f"{self.failed:,} failed", "red")] if self.failed else []),
            *self._left(),
            Segment(f"{len(meters)} running"),
            *_reading(meters),
            *self._speed(tokens),
            Segment(counted(tokens, "token"), dropped=2),
            Segment(f"{psutil.Process().memory_info().rss / GIB:.1f} GiB", "dim", dropped=3),
        ]
        line = fitted(segments, self._terminal.size()[0] - 1 - min(len(labels), _LABELS))
        return line.append(f"{SEPARATOR}{labels}") if labels else line  # cut at the terminal's edge

    def _left(self) -> list[Segment]:
        """Return the time that is left, if the other sequences take as long as those that were generated."""
        generated = self._done - self._skipped
        if not generated or self._started_at is None:
            return []
        each = (time.monotonic() - self._started_at) / generated
        return [Segment(time_left(each * (self._known - self._done)), "cyan", dropped=1)]

    def _speed(self, tokens: int) -> list[Segment]:
        """Return the tokens a second of all together, since the first one."""
        seconds = 0.0 if self._first_at is None else time.monotonic() - self._first_at
        return [Segment(rate(tokens / seconds), "cyan", dropped=1)] if seconds > 0 else []


def _reading(meters: Sequence[Meter]) -> list[Segment]:
    """Return how much of their prompts those sequences have read that have not read all."""
    reading = [meter for meter in meters if meter.prefilled_tokens < meter.prompt_tokens]
    if not reading:
        return []
    done, total = (sum(getattr(meter, name) for meter in reading) for name in ("prefilled_tokens", "prompt_tokens"))
    return [Segment(f"reading {done:,}/{total:,} tokens", dropped=1)]
