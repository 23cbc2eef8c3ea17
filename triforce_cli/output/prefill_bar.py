"""The bar of a prefill on stderr."""

import time
from collections.abc import Callable

from rich.live import Live
from rich.text import Text

from offload.events import Prefilled
from offload.metrics import Meter

from .cursor import visible
from .format import rate, time_left
from .tables import Segment, fitted
from .terminal import Terminal

_LONGEST, _SHORTEST = 40, 6  # cells of the bar


class PrefillBar(Live):
    """A line such as `prefill ━━━━━━ 3,072/5,797 tokens · 426/s · 0:06 left · 2,048 from the cache`.

    `pass_tokens` returns how far the forward pass under way is, in tokens; it is called at each refresh, by another
    thread than the pass.
    """

    def __init__(
        self,
        terminal: Terminal,
        label: str,
        meter: Meter,
        pass_tokens: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal, self._label, self._meter, self._pass_tokens = terminal, visible(label), meter, pass_tokens
        self._clock, self._began = clock, clock()  # Live has attributes of its own: `_started` is one
        self._event, self._done = Prefilled(0, 0), 0.0
        # It must not touch sys.stdout, which belongs to the text.
        options = {"transient": True, "redirect_stdout": False, "redirect_stderr": False, "refresh_per_second": 10}
        super().__init__(console=terminal.console(), get_renderable=self.line, **options)

    def observe(self, event: Prefilled) -> None:
        """Show the state after an event that the meter has observed."""
        self._event, self._done = event, float(event.done)

    def line(self) -> Text:
        """Return the whole line, fitted to the terminal's width."""
        event, columns, cached = self._event, self._terminal.size()[0] - 1, self._meter.cached_tokens
        # The pass may have ended a moment before its event: never backwards.
        self._done = max(self._done, min(event.done + self._pass_tokens(), event.total))
        segments = [Segment(f"{int(self._done):,}/{event.total:,} tokens"), *self._speed()]
        if cached and not event.restored:
            segments.append(Segment(f"{cached:,} from the cache", "green", dropped=2))
        facts = fitted(segments, columns - len(self._label) - _SHORTEST - 2)
        cells = max(min(columns - len(self._label) - facts.cell_len - 2, _LONGEST), 0)
        done = round(cells * self._done / (event.total or 1))
        bar = [("━" * done, "bar.complete"), ("─" * (cells - done), "bar.back")]
        line = Text.assemble((self._label, "bold"), " ", *bar, " ", facts, no_wrap=True)
        line.truncate(columns, overflow="ellipsis")
        return line

    def _speed(self) -> list[Segment]:
        """Return the rate of the computed tokens, and the time left at it."""
        if self._event.restored:
            return [Segment("reading the cache", "green", dropped=1)]
        computed = self._done - self._meter.cached_tokens
        seconds = self._clock() - self._began - (self._meter.restore_s or 0.0)
        if computed <= 0 or seconds <= 0:
            return []
        left = time_left((self._event.total - self._done) * seconds / computed)
        return [Segment(rate(computed / seconds), "cyan", dropped=3), Segment(left, "cyan", dropped=1)]
