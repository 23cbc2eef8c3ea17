"""Progress on stderr: fetching and loading a model, prefill, then decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from rich.text import Text

from offload.events import DraftPrefilled, Event, Pinned, Prefilled, Tokens
from offload.level_metrics import tokens_per_verification
from offload.metrics import Meter
from offload.units import GIB, counted

from .format import gained, percent, rate, time_left
from .status_line import EDGE, INTERVAL, Content, StatusLine
from .tables import Segment, fitted
from .terminal import Terminal
from .text_layout import visible

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_LONGEST, _SHORTEST = 40, 6  # cells of a bar

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a generation that the display shows.

    Args:
        meter: observes the generation's events before they are displayed.
        limit: most tokens that are generated.
        method: of decoding, as it was asked for.
        label: names the part of a document, where this is one.
        pass_tokens: returns how far the forward pass under way is, in tokens, for the bar within a chunk. It is called
            by another thread than that of the pass.
    """

    meter: Meter
    limit: int = 0
    method: str = ""
    label: str = ""
    pass_tokens: Callable[[], float] = lambda: 0.0


class ProgressDisplay:
    """The progress of a generation on stderr. Draws nothing if not `shown`; text is always written."""

    def __init__(self, terminal: Terminal, shown: bool = True, verbose: bool = False) -> None:
        """`verbose` adds the method, its acceptance and its drafts to the line of decoding."""
        self._terminal, self._shown, self._verbose = terminal, shown, verbose
        self._line = StatusLine(terminal)
        self._prefill: PrefillLine | None = None
        self._decoding: Content | None = None
        terminal.before_line = self.hide

    def loading(self, text: str) -> None:
        """Show a spinner beside this text, until something else is shown."""
        frame = lambda: _SPINNER[int(time.monotonic() / INTERVAL) % len(_SPINNER)]  # noqa: E731
        self.status(lambda: Text(f"{frame()} {visible(text)}"))

    def status(self, content: Content, live: bool = True) -> None:
        """Show the line that `content` returns; draw it once if it is not `live`."""
        if self._shown:
            self._line.show(content, live)

    def start(self, facts: RunFacts) -> None:
        """Prepare for the events of a generation: the model is loaded and prefill begins."""
        self.hide()
        self._prefill = PrefillLine(facts, self._columns)
        # Text that comes back to the screen through a pipe cannot be drawn around.
        may_draw = self._terminal.stdout_is_terminal or not self._terminal.text_may_show
        self._decoding = partial(decoding_line, facts, self._columns, self._verbose) if may_draw else None

    def event(self, event: Event) -> None:
        """Show the state after an event that the meter has observed."""
        if isinstance(event, Prefilled) and self._prefill is not None:
            self._prefill.event = event
            self.status(self._prefill)
        elif isinstance(event, Pinned):
            self.loading(f"pinning host memory: {event.done / GIB:.0f} of {event.total / GIB:.0f} GiB")
        elif isinstance(event, DraftPrefilled):
            self.loading(f"the draft model reads {event.done:,}/{event.total:,} tokens")
        elif isinstance(event, Tokens) and self._decoding is not None:
            self.status(self._decoding)
        elif isinstance(event, Tokens):
            self.hide()

    def _columns(self) -> int:
        return self._terminal.size()[0] - EDGE

    def write(self, text: str) -> None:
        """Write text to stdout, around whatever is shown."""
        self._line.write(text)

    def think(self, text: str) -> None:
        """Write the model's thoughts to stderr, around whatever is shown."""
        self._line.think(text)

    def hide(self) -> None:
        """Erase everything; the next event draws it again."""
        self._line.clear()

    def close(self) -> None:
        """Erase everything and draw nothing more. May be called again."""
        self.hide()
        self._shown = False


class PrefillLine:
    """A line such as `reading ━━━━━━━━ 3,072/5,797 tokens · 426/s · 0:06 left · 2,048 from the cache`."""

    def __init__(self, facts: RunFacts, columns: Callable[[], int], clock: Clock = time.monotonic) -> None:
        self._facts, self._columns, self._clock, self._began = facts, columns, clock, clock()
        self._shown = 0.0
        self.event = Prefilled(0, 0)

    def __call__(self) -> Text:
        """Return the line, moved on by the pass under way."""
        event, meter = self.event, self._facts.meter
        # The pass may have ended a moment before its event: never backwards.
        self._shown = done = max(self._shown, event.done, min(event.done + self._facts.pass_tokens(), event.total))
        segments = [Segment(f"{int(done):,}/{event.total:,} tokens")]
        seconds = self._clock() - self._began - (meter.restore_s or 0.0)
        if event.restored:
            segments.append(Segment("reading the cache", "green", dropped=1))
        elif (computed := done - meter.cached_tokens) > 0 and seconds > 0:
            left = time_left((event.total - done) * seconds / computed)
            segments += [Segment(rate(computed / seconds), "cyan", dropped=3), Segment(left, "cyan", dropped=1)]
        if meter.cached_tokens and not event.restored:
            segments.append(Segment(f"{meter.cached_tokens:,} from the cache", "green", dropped=2))
        label = f"{self._facts.label} · reading " if self._facts.label else "reading "
        room = self._columns() - cell_len(label) - 1
        facts = fitted(segments, room - _SHORTEST)
        return Text(visible(label)) + bar(done / max(event.total, 1), room - facts.cell_len) + Text(" ") + facts


def bar(share: float, room: int) -> Text:
    """Return a bar of up to `_LONGEST` cells, as much of it filled as is done."""
    cells = max(min(room, _LONGEST), 0)
    done = int(share * cells)
    return Text("━" * done, "cyan") + Text("╌" * (cells - done), "dim")


class DownloadBar:
    """A bar while a model is fetched: a context manager, called with what is fetched, units done and units in all."""

    def __init__(self, terminal: Terminal, shown: bool = True, clock: Clock = time.monotonic) -> None:
        self._terminal, self._shown, self._clock, self._line = terminal, shown, clock, StatusLine(terminal)
        self._state = "", 0, 1
        self._began: dict[str, float] = {}

    def __enter__(self) -> DownloadBar:
        return self  # nothing is drawn yet: a model that is already on disk needs no bar

    def __exit__(self, *error: object) -> None:
        self._line.clear()

    def __call__(self, description: str, done: int, total: int) -> None:
        if not self._began and self._terminal.before_line is not None:
            self._terminal.before_line()  # erases the spinner
        self._began.setdefault(description, self._clock())
        self._state = description, done, max(total, 1)
        if self._shown:
            self._line.show(self._text)

    def _text(self) -> Text:
        description, done, total = self._state
        left = (self._clock() - self._began[description]) * (total - done) / done if done else 0.0
        facts = [Segment(percent(done / total)), *([Segment(time_left(left), "cyan")] if left else [])]
        return Text(f"{visible(description)} ") + bar(done / total, _LONGEST) + Text(" ") + fitted(facts, _LONGEST)


def decoding_line(facts: RunFacts, columns: Callable[[], int], verbose: bool) -> Text:
    """Return the status of decoding: tokens, rate and gain; with `verbose`, method, acceptance and drafts."""
    meter, speed = facts.meter, facts.meter.tokens_per_s
    gain = None if meter.speculated is None else meter.speculated.gain
    segments = [
        Segment(facts.label, "bold"),
        Segment(f"{meter.new_tokens:,} of at most {counted(facts.limit, 'token')}"),
        Segment(rate(speed) if speed else "…/s", "cyan"),
        Segment("" if gain is None else gained(gain.speedup), "green", dropped=1),
        *(Segment(text, dropped=2) for text in (_speculation(facts.method, meter) if verbose else [])),
    ]
    return fitted([segment for segment in segments if segment.text], columns())


def _speculation(method: str, meter: Meter) -> list[str]:
    """Return the method and its current drafter, the acceptance of each drafter, and the tokens a verification."""
    using = "" if meter.speculated is None else meter.speculated.using
    if method == "auto" and using:
        method = f"auto: {'plain' if using == 'none' else using}"
    rates = [
        f"{row.drafter}→{row.verifier} {percent(row.acceptance)}" for row in meter.levels if row.acceptance is not None
    ]
    drafts = [", ".join(rates), f"{tokens_per_verification(meter.levels):.1f}/verification"] if rates else []
    return [method, *drafts]
