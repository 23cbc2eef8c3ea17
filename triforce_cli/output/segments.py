"""Lines of segments that are fitted to the terminal's width by leaving out the less important ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from .cursor import visible
from .wrapping import SEPARATOR


class Segment(NamedTuple):
    """A segment of a line. Those with the highest `dropped` are left out first, those with 0 never."""

    text: str
    style: str = ""
    dropped: int = 0


def fitted(segments: Sequence[Segment], columns: int) -> Text:
    """Return the segments that fit, joined."""
    segments = list(segments)
    while True:
        line = Text(SEPARATOR).join(Text(visible(segment.text), style=segment.style) for segment in segments)
        least = max(segments, key=lambda segment: segment.dropped)
        if line.cell_len <= columns or least.dropped == 0:
            return line
        segments.remove(least)
