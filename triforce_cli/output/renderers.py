"""Renders a generation's events: plain text or JSON lines on stdout, status and statistics on stderr."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any, Protocol

from offload.events import DraftPrefilled, Event, Pinned, Prefilled, Restored, Text
from offload.metrics import Meter, Summary

from .format import rounded
from .progress import ProgressDisplay, RunFacts
from .sections import Part, Section
from .statistics import INDENT, detail_lines, statistics_line
from .terminal import Terminal
from .verification import verification_line

# DEL, C1, line separators and bidirectional overrides: JSON may hold them raw, terminals and line readers should not.
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Renderer(Protocol):
    """The output of a command. Called in this order: loading, start, event..., finish or interrupt; close always.

    `event`, `finish` and `interrupt` raise BrokenPipeError when stdout's reader has closed it.
    """

    def loading(self, text: str) -> None:
        """Show that the model is being opened or loaded, with this text."""

    def warn(self, text: str) -> None:
        """Print a warning before the events of a generation."""

    def start(self, facts: RunFacts) -> None:
        """Prepare for the events of a generation, which `facts.meter` observes first."""

    def event(self, event: Event) -> None:
        """Render one event of the engine or of the text layer."""

    def verifying(self, text: str) -> None:
        """Show that the complete text is being verified; `finish` follows."""

    def finish(self, summary: Summary) -> None:
        """End the output, and print one line of statistics, or with `verbose` all of them."""

    def interrupt(self, summary: Summary) -> None:
        """End the output after Ctrl-C, with partial statistics."""

    def close(self) -> None:
        """Erase everything that is drawn. May be called again."""


class Output(Protocol):
    """A format of stdout. Text is returned, not written: the display writes it around what is drawn."""

    def section(self, section: Section) -> str:
        """Return the text before the events of one of several answers."""

    def of(self, event: Event, meter: Meter) -> str:
        """Return the text for one event, which `meter` has observed; often ""."""

    def end(self, summary: Summary, meter: Meter) -> str:
        """Return the text after the last event."""


class TextOutput:
    """The generated text, with the headings of sections where there are any."""

    def __init__(self) -> None:
        self._sections = 0

    def section(self, section: Section) -> str:
        self._sections += 1
        blank = "\n" if self._sections > 1 else ""
        return blank + "".join(f"{heading}\n\n" for heading in section.headings)

    def of(self, event: Event, meter: Meter) -> str:
        return event.text if isinstance(event, Text) else ""

    def end(self, summary: Summary, meter: Meter) -> str:
        return ""


class JsonOutput:
    """JSON lines: one for each step of prefill and each piece of text, and the summary in the last."""

    def section(self, section: Section) -> str:
        return json_line(type="section", document=section.document, question=section.question)

    def of(self, event: Event, meter: Meter) -> str:
        if isinstance(event, Pinned):
            return json_line(type="pinning", **asdict(event))
        if isinstance(event, Prefilled):
            return json_line(type="prefill", **asdict(event))
        if isinstance(event, DraftPrefilled):
            return json_line(type="draft_prefill", **asdict(event))
        if isinstance(event, Restored):
            return json_line(type="cache", **rounded(asdict(event)))
        if isinstance(event, Text) and event.text:
            return json_line(type="text", text=event.text, tokens=meter.new_tokens)
        return ""

    def end(self, summary: Summary, meter: Meter) -> str:
        exact = {"settings": summary.settings, "verify": summary.verify}
        return json_line(type="done", **rounded(asdict(replace(summary, settings={}, verify=None))) | exact)


class PartOutput:
    """The notes on a part, which are not the answer: one line in JSON when they are complete, nothing as text."""

    def __init__(self, part: Part, in_json: bool) -> None:
        self._part = part
        self._in_json = in_json

    def section(self, section: Section) -> str:
        raise AssertionError("a part has no sections")

    def of(self, event: Event, meter: Meter) -> str:
        return ""

    def end(self, summary: Summary, meter: Meter) -> str:
        return self.line(meter.text, False) if summary.finish_reason != "interrupted" else ""

    def line(self, text: str, taken_over: bool) -> str:
        """Return the part's line in JSON; `taken_over` from an earlier run."""
        return json_line(type="part", **asdict(self._part), taken_over=taken_over, text=text) if self._in_json else ""


class StreamRenderer:
    """An output on stdout, with a display on stderr and the statistics after it; `quiet` keeps stderr silent."""

    def __init__(
        self,
        terminal: Terminal,
        output: Output,
        quiet: bool = False,
        verbose: bool = False,
        display: ProgressDisplay | None = None,
        label: str = "",
    ) -> None:
        """`label` names the part of a document that is rendered, on the `display` of the whole."""
        self._terminal = terminal
        self._output = output
        self._quiet, self._verbose = quiet, verbose
        self._label = f"{label}: " if label else ""
        self._display = display or ProgressDisplay(terminal, shown=not quiet)
        self._meter = Meter(0)  # until `start` gives the generation's

    def section(self, section: Section) -> None:
        """Begin one of several answers, whose events follow."""
        self._display.hide()
        self._terminal.write(self._output.section(section))

    def for_part(self, part: Part) -> StreamRenderer:
        """Return the renderer of notes on a part, from which the next answer is made."""
        output = PartOutput(part, isinstance(self._output, JsonOutput))
        return StreamRenderer(self._terminal, output, self._quiet, self._verbose, self._display, part.label)

    def taken_over(self, part: Part, text: str) -> None:
        """Render a part that an earlier run has finished."""
        self._display.hide()
        self._terminal.write(PartOutput(part, isinstance(self._output, JsonOutput)).line(text, True))

    def loading(self, text: str) -> None:
        self._display.loading(text)

    def warn(self, text: str) -> None:
        self._display.hide()
        self._terminal.warn(text)

    def start(self, facts: RunFacts) -> None:
        self._meter = facts.meter
        self._display.start(facts)

    def event(self, event: Event) -> None:
        self._display.event(event)
        self._display.write(self._output.of(event, self._meter))

    def verifying(self, text: str) -> None:
        self._display.hide()
        self._terminal.end_line()  # the spinner needs a line of its own
        self._display.loading(text)

    def finish(self, summary: Summary) -> None:
        self._display.hide()
        self._terminal.write(self._output.end(summary, self._meter))
        if summary.finish_reason == "interrupted":
            self._terminal.end_line()
        else:
            self._terminal.end_text()
        if not self._quiet:
            self._terminal.note(self._label + statistics_line(summary))
            for line in detail_lines(summary) if self._verbose else ():
                self._terminal.note(line, INDENT)
            if summary.verify is not None and summary.verify["lossless"]:  # otherwise an error is raised with it
                self._terminal.note(verification_line(summary.verify))

    def interrupt(self, summary: Summary) -> None:
        self._display.hide()
        self._terminal.after_ctrl_c()
        self.finish(summary)

    def close(self) -> None:
        self._display.close()


class TextRenderer(StreamRenderer):
    """Writes the generated text to stdout, as it comes."""

    def __init__(self, terminal: Terminal, quiet: bool = False, verbose: bool = False) -> None:
        super().__init__(terminal, TextOutput(), quiet, verbose)


class JsonRenderer(StreamRenderer):
    """Writes JSON lines to stdout, as they come."""

    def __init__(self, terminal: Terminal, quiet: bool = False, verbose: bool = False) -> None:
        super().__init__(terminal, JsonOutput(), quiet, verbose)


def renderer_for(terminal: Terminal, json: bool, quiet: bool, verbose: bool) -> StreamRenderer:
    """Return the renderer of JSON lines or of text, with the spinner of the start.

    It is shown from here on: importing torch takes seconds.
    """
    renderer = (JsonRenderer if json else TextRenderer)(terminal, quiet, verbose)
    renderer.loading("starting")
    return renderer


def json_line(**fields: Any) -> str:
    """Return one line of JSON: UTF-8, with escapes for characters that control a terminal or split the line."""
    text = json.dumps(fields, ensure_ascii=False, default=str)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"
