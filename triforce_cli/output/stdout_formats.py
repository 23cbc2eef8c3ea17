"""Formats of stdout: the generated text, or JSON lines."""

import json
import re
from dataclasses import asdict, replace
from typing import Any

from offload.events import DraftPrefilled, Event, Pinned, Prefilled, Restored, Text, Thought
from offload.loading.tokenizers.thinking import CLOSING, OPENING
from offload.metrics import Meter, Summary

from .format import rounded
from .turns import Section

_PROGRESS: dict[type, str] = {
    Pinned: "pinning",
    Prefilled: "prefill",
    DraftPrefilled: "draft_prefill",
    Restored: "cache",
}
# DEL, C1, line separators and bidirectional overrides: JSON may hold them raw, terminals and line readers should not.
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Output:
    """A format of stdout. Text is returned, not written: the display writes it around what is drawn.

    Attributes:
        thinks_aside: whether a model's thoughts are shown on stderr instead of stdout.
    """

    thinks_aside = False

    def section(self, section: Section) -> str:
        """Return the text before the events of one of several answers."""
        return ""

    def line(self, kind: str, **fields: Any) -> str:
        """Return a line beside the events, such as one for the notes on a part of a document; JSON alone has it."""
        return ""

    def of(self, event: Event, meter: Meter) -> str:
        """Return the text for one event, which `meter` has observed; often ""."""
        return ""

    def end(self, summary: Summary, meter: Meter) -> str:
        """Return the text after the last event."""
        return ""


class TextOutput(Output):
    """The generated text, with the headings of sections where there are any."""

    def __init__(self, show_thinking: bool = False) -> None:
        """`show_thinking`: the model's thoughts are a part of the text, between their marks."""
        self.thinks_aside = not show_thinking
        self._sections = 0

    def section(self, section: Section) -> str:
        self._sections += 1
        blank = "\n" if self._sections > 1 else ""
        return blank + "".join(f"{heading}\n\n" for heading in section.headings)

    def of(self, event: Event, meter: Meter) -> str:
        shows = not self.thinks_aside
        if isinstance(event, Thought) and event.text and shows:
            return event.text if len(meter.thoughts) > 1 else f"{OPENING}\n{event.text}"
        if not isinstance(event, Text):
            return ""
        ends_thinking = shows and meter.thoughts and event.text and len(meter.pieces) == 1
        return f"\n{CLOSING}\n\n{event.text}" if ends_thinking else event.text

    def end(self, summary: Summary, meter: Meter) -> str:
        is_open = meter.thoughts and not meter.pieces and not self.thinks_aside
        return f"\n{CLOSING}\n" if is_open else ""


class JsonOutput(Output):
    """JSON lines: one for each step of prefill and each piece of text, and the summary in the last."""

    def section(self, section: Section) -> str:
        return json_line(type="section", document=section.document, question=section.question)

    def line(self, kind: str, **fields: Any) -> str:
        return json_line(type=kind, **fields)

    def of(self, event: Event, meter: Meter) -> str:
        if (kind := _PROGRESS.get(type(event))) is not None:
            return json_line(type=kind, **rounded(asdict(event)))
        if isinstance(event, Text | Thought) and event.text:
            kind = "text" if isinstance(event, Text) else "thinking"
            return json_line(type=kind, text=event.text, tokens=meter.new_tokens)
        return ""

    def end(self, summary: Summary, meter: Meter) -> str:
        exact = {"settings": summary.settings, "verify": summary.verify}
        return json_line(type="done", **rounded(asdict(replace(summary, settings={}, verify=None))) | exact)


def json_line(**fields: Any) -> str:
    """Return one line of JSON: UTF-8, with escapes for characters that control a terminal or split the line."""
    text = json.dumps(fields, ensure_ascii=False, default=str)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"
