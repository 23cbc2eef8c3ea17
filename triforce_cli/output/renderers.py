"""Renders a generation's events: plain text or JSON lines on stdout, status and statistics on stderr."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from offload.events import Event, Thought
from offload.metrics import Meter, Summary
from offload.short_repr import short_text

from .batch_display import BatchDisplay
from .progress import ProgressDisplay, RunFacts
from .statistics import INDENT, detail_lines, statistics_line, verification_line
from .stdout_formats import JsonOutput, Output, TextOutput
from .terminal import Terminal
from .turns import Part, Perform, Section, at_once


class Renderer:
    """An output on stdout, with a display on stderr and the statistics after it; `quiet` keeps stderr silent.

    Called in this order: loading, start, event..., finish or interrupt; close always. `event`, `finish` and `interrupt`
    raise BrokenPipeError when stdout's reader has closed it.
    """

    def __init__(
        self,
        terminal: Terminal,
        output: Output,
        quiet: bool = False,
        verbose: bool = False,
        display: ProgressDisplay | None = None,
        perform: Perform = at_once,
        part: Part | None = None,
    ) -> None:
        """`part` is the part of a document that is rendered, on the `display` of the whole.

        `perform` is called with everything that writes to the streams: now, or in its turn among other sequences.
        """
        self._terminal, self._output, self._part = terminal, output, part
        self._quiet, self._verbose = quiet, verbose
        self._display = display or ProgressDisplay(terminal, not quiet, verbose)
        self._perform = perform
        self._meter = Meter(0)  # until `start` gives the generation's

    def section(self, section: Section) -> None:
        """Begin one of several answers, whose events follow."""
        self._display.hide()
        self._terminal.write(self._output.section(section))

    def truncated(self, fields: Mapping[str, Any]) -> None:
        """Render which part of a truncated document is left, before the events of its answer."""
        self.write(self._output.line("truncated", **fields))

    def for_part(self, part: Part, perform: Perform | None = None) -> Renderer:
        """Return the renderer of notes on a part, from which the next answer is made."""
        options = self._quiet, self._verbose, self._display, perform or self._perform, part
        return Renderer(self._terminal, self._output, *options)

    def for_batch(self) -> BatchDisplay:
        """Show the progress of several sequences from here on; return the display."""
        self._display.hide()
        self._display = BatchDisplay(self._terminal, shown=not self._quiet)
        return self._display

    def for_sequence(self, perform: Perform) -> Renderer:
        """Return the renderer of one of several sequences, whose output `perform` writes in its turn."""
        return Renderer(self._terminal, self._output, self._quiet, self._verbose, self._display, perform)

    def taken_over(self, part: Part, text: str) -> None:
        """Render a part that an earlier run has finished."""
        self._perform(partial(self.write, self._part_line(part, text, True)))

    def _part_line(self, part: Part, text: str, taken_over: bool) -> str:
        return self._output.line("part", **asdict(part), taken_over=taken_over, text=text)

    def write(self, text: str) -> None:
        self._display.hide()
        self._terminal.write(text)

    def loading(self, text: str) -> None:
        """Show that the model is being opened or loaded, with this text."""
        self._display.loading(text)

    def warn(self, text: str) -> None:
        """Print a warning before the events of a generation."""
        self._display.hide()
        self._terminal.warn(text)

    def start(self, facts: RunFacts) -> None:
        """Prepare for the events of a generation, which `facts.meter` observes first."""
        self._meter = facts.meter
        self._display.start(facts)

    def event(self, event: Event) -> None:
        """Render one event of the engine or of the text layer."""
        self._display.event(event)
        if self._part is not None:
            return  # notes are written when they are complete
        if isinstance(event, Thought) and event.text and self._output.thinks_aside and not self._quiet:
            self._perform(partial(self._display.think, event.text))
        if text := self._output.of(event, self._meter):
            self._perform(partial(self._display.write, text))

    def verifying(self, text: str) -> None:
        """Show that the complete text is being verified; `finish` follows."""
        self._perform(partial(self._verifying, text))

    def _verifying(self, text: str) -> None:
        self._display.hide()
        self._terminal.end_line()  # the spinner needs a line of its own
        self._display.loading(text)

    def finish(self, summary: Summary) -> None:
        """End the output, and print one line of statistics, or with `verbose` all of them."""
        text = ""
        if self._part is None:
            text = self._output.end(summary, self._meter)
        elif summary.finish_reason != "interrupted":
            text = self._part_line(self._part, self._meter.text, False)
        self._perform(partial(self._finish, text, summary))

    def _finish(self, text: str, summary: Summary) -> None:
        self.write(text)
        if summary.finish_reason == "interrupted":
            self._terminal.end_line()
        else:
            self._terminal.end_text()
        if self._quiet:
            return
        for quote in summary.quotes or ():
            where = f"{quote['document']}, " if "document" in quote else ""
            where += f"characters {quote['start']:,} to {quote['end']:,}"
            self._terminal.note(f'{where}: "{short_text(quote["text"])}"')
        if self._reports(summary):
            label = "" if self._part is None else f"{self._part.label}: "
            self._terminal.note(label + statistics_line(summary))
            for line in detail_lines(summary) if self._verbose else ():
                self._terminal.note(line, INDENT)
            if summary.verify is not None and summary.verify["lossless"]:  # otherwise an error is raised with it
                self._terminal.note(verification_line(summary.verify))

    def _reports(self, summary: Summary) -> bool:
        """Return whether the statistics are printed: of a part, only where no line has shown its progress."""
        is_shown = self._part is not None and self._terminal.shows_progress
        return self._verbose or not is_shown or summary.finish_reason == "interrupted"

    def interrupt(self, summary: Summary) -> None:
        """End the output after Ctrl-C, with partial statistics."""
        self._perform(self._interrupted)
        self.finish(summary)

    def _interrupted(self) -> None:
        self._display.hide()
        self._terminal.after_ctrl_c()

    def hide(self) -> None:
        """Erase what is drawn, before something else writes to the terminal; the next event draws it again."""
        self._display.hide()

    def close(self) -> None:
        """Erase everything that is drawn. May be called again."""
        self._display.close()


def renderer_for(terminal: Terminal, json: bool, quiet: bool, verbose: bool, show_thinking: bool = False) -> Renderer:
    """Return the renderer of JSON lines or of text, with the spinner of the start.

    It is shown from here on: importing torch takes seconds. Text is wrapped on a terminal, JSON is not.
    """
    terminal.wraps = not json
    renderer = Renderer(terminal, JsonOutput() if json else TextOutput(show_thinking), quiet, verbose)
    renderer.loading("starting")
    return renderer


def tokenizing(renderer: Renderer) -> Callable[[int, int], None]:
    """Return a function that shows how many characters of a long prompt have been encoded."""
    return lambda done, total: renderer.loading(f"tokenizing: {done:,} of {total:,} characters")
