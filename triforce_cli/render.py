"""Engine events -> what the user gets: plain text or JSON lines on stdout, status and statistics on stderr."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, Protocol

from offload.events import Event, Prefilled, Text, Tokens
from offload.statistics import Summary

from .progress import ProgressDisplay, RunFacts
from .terminal import Terminal
from .verification import verdict
from .wording import statistics_line

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

    def of(self, event: Event) -> str:
        """For one event; often nothing."""

    def end(self, summary: Summary) -> str:
        """After the last event."""


class TextOutput:
    """The generated text and nothing else."""

    def of(self, event: Event) -> str:
        return event.text if isinstance(event, Text) else ""

    def end(self, summary: Summary) -> str:
        return ""


class JsonOutput:
    """JSON lines: one for each step of prefill and each piece of text, and the summary in the last."""

    def __init__(self) -> None:
        self._tokens = 0

    def of(self, event: Event) -> str:
        if isinstance(event, Tokens):
            self._tokens += len(event.ids)
        elif isinstance(event, Prefilled):
            return json_line(type="prefill", done=event.done, total=event.total)
        elif isinstance(event, Text):
            return json_line(type="text", text=event.text, tokens=self._tokens) if event.text else ""
        return ""

    def end(self, summary: Summary) -> str:
        return json_line(type="done", **asdict(summary))


class StreamRenderer:
    """An output on stdout, with a display on stderr and the statistics after it; `quiet` keeps stderr silent."""

    def __init__(self, terminal: Terminal, output: Output, quiet: bool = False) -> None:
        self._terminal = terminal
        self._output = output
        self._quiet = quiet
        self._display = ProgressDisplay(terminal, shown=not quiet)

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
            self._terminal.note(statistics_line(summary))
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
