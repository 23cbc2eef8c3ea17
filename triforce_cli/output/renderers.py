"""Engine events -> what the user gets: plain text or JSON lines on stdout, status and statistics on stderr."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, Protocol

from offload.events import Event, Prefilled, Restored, Text, Tokens
from offload.metrics import Summary

from .format import statistics_line
from .progress import ProgressDisplay, RunFacts
from .sections import Part, Section
from .terminal import Terminal
from .verdict import verdict

# DEL, C1, line separators and bidirectional overrides: JSON may hold them raw, terminals and line readers should not.
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Renderer(Protocol):
    """What a command tells while it runs: loading, then start, then events, then finish or interrupt; close always.

    BrokenPipeError comes out of `event`, `finish` and `interrupt` when nobody reads stdout any more.
    """

    def loading(self, text: str) -> None:
        """The model is being opened or loaded; `text` says which."""

    def start(self, facts: RunFacts) -> None:
        """The model is loaded, and events follow."""

    def event(self, event: Event) -> None:
        """One event of the engine or of the text layer."""

    def verifying(self, text: str) -> None:
        """The text is complete, and it is being looked whether it is right; `finish` follows."""

    def finish(self, summary: Summary) -> None:
        """The end of the output, and one line of statistics."""

    def interrupt(self, summary: Summary) -> None:
        """The same after Ctrl-C: what was written stays, the statistics are partial."""

    def close(self) -> None:
        """Leave nothing on the terminal, whatever happened. May be called again."""


class Output(Protocol):
    """What stdout gets. Text is returned, not written: the display knows how to write around what is drawn."""

    def section(self, section: Section) -> str:
        """Before the events of one of several answers."""

    def of(self, event: Event) -> str:
        """For one event; often nothing."""

    def end(self, summary: Summary) -> str:
        """After the last event."""


class TextOutput:
    """The generated text and nothing else; where there are sections, their headings, and a newline after each."""

    def __init__(self) -> None:
        self._sections = 0
        self._text = ""  # its last character

    def section(self, section: Section) -> str:
        self._sections += 1
        blank = "\n" if self._sections > 1 else ""
        return blank + "".join(f"{heading}\n\n" for heading in section.headings)

    def of(self, event: Event) -> str:
        if not isinstance(event, Text):
            return ""
        self._text = event.text[-1:] or self._text
        return event.text

    def end(self, summary: Summary) -> str:
        return "\n" if self._sections and self._text != "\n" else ""


class JsonOutput:
    """JSON lines: one for each step of prefill and each piece of text, and the summary in the last."""

    def __init__(self) -> None:
        self._tokens = 0

    def section(self, section: Section) -> str:
        self._tokens = 0
        return json_line(type="section", document=section.document, question=section.question)

    def of(self, event: Event) -> str:
        if isinstance(event, Tokens):
            self._tokens += len(event.ids)
        elif isinstance(event, Prefilled):
            return json_line(type="prefill", done=event.done, total=event.total)
        elif isinstance(event, Restored):
            return json_line(type="cache", **asdict(event))
        elif isinstance(event, Text):
            return json_line(type="text", text=event.text, tokens=self._tokens) if event.text else ""
        return ""

    def end(self, summary: Summary) -> str:
        return json_line(type="done", **asdict(summary))


class PartOutput:
    """A part of a longer work, which is not the product: in JSON one line when it is done, otherwise nothing."""

    def __init__(self, part: Part, in_json: bool) -> None:
        self._part = part
        self._in_json = in_json
        self._text = ""

    def section(self, section: Section) -> str:
        raise AssertionError("a part has no sections")

    def of(self, event: Event) -> str:
        self._text += event.text if isinstance(event, Text) else ""
        return ""

    def end(self, summary: Summary) -> str:
        return self.line(self._text, False) if summary.finish_reason != "interrupted" else ""

    def line(self, text: str, taken_over: bool) -> str:
        """Its line in JSON; `taken_over` from an earlier run."""
        return json_line(type="part", **asdict(self._part), taken_over=taken_over, text=text) if self._in_json else ""


class StreamRenderer:
    """An output on stdout, with a display on stderr and the statistics after it; `quiet` keeps stderr silent."""

    def __init__(
        self,
        terminal: Terminal,
        output: Output,
        quiet: bool = False,
        display: ProgressDisplay | None = None,
        label: str = "",
    ) -> None:
        """`label` says which part of a longer work it tells, with the `display` of the whole."""
        self._terminal = terminal
        self._output = output
        self._quiet = quiet
        self._label = f"{label}: " if label else ""
        self._display = display or ProgressDisplay(terminal, shown=not quiet)

    def section(self, section: Section) -> None:
        """The events of one of several answers follow."""
        self._display.hide()
        self._terminal.write(self._output.section(section))

    def for_part(self, part: Part) -> StreamRenderer:
        """What tells a part of the work that leads to the next answer."""
        output = PartOutput(part, isinstance(self._output, JsonOutput))
        return StreamRenderer(self._terminal, output, self._quiet, self._display, part.label)

    def taken_over(self, part: Part, text: str) -> None:
        """A part that an earlier run has finished."""
        self._display.hide()
        self._terminal.write(PartOutput(part, isinstance(self._output, JsonOutput)).line(text, True))

    def loading(self, text: str) -> None:
        self._display.loading(text)

    def start(self, facts: RunFacts) -> None:
        self._display.start(facts)

    def event(self, event: Event) -> None:
        self._display.event(event)
        self._display.write(self._output.of(event))

    def verifying(self, text: str) -> None:
        self._display.hide()
        self._terminal.end_line()  # the spinner needs a line of its own
        self._display.loading(text)

    def finish(self, summary: Summary) -> None:
        self._display.hide()
        self._terminal.write(self._output.end(summary))
        self._terminal.end_line()
        if not self._quiet:
            self._terminal.note(self._label + statistics_line(summary))
            if summary.verify is not None and summary.verify["lossless"]:  # otherwise the error says it
                self._terminal.note(verdict(summary.verify))

    def interrupt(self, summary: Summary) -> None:
        self._display.hide()
        self._terminal.after_ctrl_c()
        self.finish(summary)

    def close(self) -> None:
        self._display.close()


class TextRenderer(StreamRenderer):
    """The generated text on stdout, as it comes."""

    def __init__(self, terminal: Terminal, quiet: bool = False) -> None:
        super().__init__(terminal, TextOutput(), quiet)


class JsonRenderer(StreamRenderer):
    """JSON lines on stdout, as they come."""

    def __init__(self, terminal: Terminal, quiet: bool = False) -> None:
        super().__init__(terminal, JsonOutput(), quiet)


def json_line(**fields: Any) -> str:
    """One line of JSON, UTF-8 as it is but for what would disturb a terminal or split the line."""
    text = json.dumps(fields, ensure_ascii=False, default=str)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"
