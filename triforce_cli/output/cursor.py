"""The effect of text on a terminal: which characters must not reach it, and where the others leave the cursor."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace

from rich.cells import cell_len

TAB = 8
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: "\N{SYMBOL FOR DELETE}"} | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    """Return the text with control characters made visible, so that a model cannot control the user's terminal.

    C0 (without newline and tab) and DEL become control pictures (ESC is U+241B), C1 and the bidirectional overrides
    become escapes such as `\\x9b`. Each character is replaced by itself, so text may come in any pieces.
    """
    return text.translate(_VISIBLE)


@dataclass(slots=True)
class Cursor:
    """The cursor's position after visible text, on a terminal `width` columns wide.

    A `column` equal to the width is the pending wrap: the last column is filled and the cursor still stands on it
    until the next character comes. `exact` is false from a character that terminals measure differently (joined
    emoji, spacing marks) to the end of its line. `row` counts the rows below the one where counting began.
    """

    width: int
    column: int = 0
    exact: bool = True
    row: int = 0

    @property
    def settled(self) -> bool:
        """Return whether the cursor certainly stands on an empty cell, so that erasing from here on loses nothing."""
        return self.exact and self.column < self.width

    def resize(self, width: int) -> None:
        """Set the width. Some terminals reflow their lines then, some do not, so the column becomes inexact."""
        if width != self.width:
            self.width = width
            self.exact = self.exact and self.column == 0

    def stays(self, text: str) -> bool:
        """Return whether the cursor would be settled on the same row after this text."""
        after = replace(self)
        after.feed(text)
        return after.settled and after.row == self.row

    def feed(self, text: str) -> None:
        """Move the cursor over text."""
        is_plain = self.exact and text.isascii() and text.isprintable()
        if is_plain and self.column + len(text) <= self.width:
            self.column += len(text)
            return
        for char in text:
            self._feed(char)

    def _feed(self, char: str) -> None:
        if char == "\n":
            self.column, self.exact, self.row = 0, True, self.row + 1
        elif char == "\t" and self.column >= self.width:
            self.exact = False  # some terminals wrap here, some stay
        elif char == "\t":
            self.column = min((self.column // TAB + 1) * TAB, self.width - 1)
        else:
            self.exact = self.exact and not _is_doubtful(char)
            cells = cell_len(char)
            if cells and self.column + cells > self.width:
                self.column, self.row = 0, self.row + 1
            self.column += cells


def _is_doubtful(char: str) -> bool:
    """Return whether terminals disagree on the width of this character or of its neighbours."""
    if char < "\u00ad":
        return False
    selector_or_flag_or_skin = "\ufe00" <= char <= "\ufe0f" or "\U0001f1e6" <= char <= "\U0001f1ff"
    selector_or_flag_or_skin |= "\U0001f3fb" <= char <= "\U0001f3ff"
    return selector_or_flag_or_skin or unicodedata.category(char) in ("Cf", "Mc", "Me", "Cn", "Co")
