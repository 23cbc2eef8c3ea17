"""Text as a terminal shows it: control characters visible, streamed text broken between words, the column known."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from rich.cells import cell_len

_TAB = 8
_MARGIN = 2  # columns that stay free: the cursor never waits at the edge, and an echoed ^C fits
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: "\N{SYMBOL FOR DELETE}"} | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_BREAK = re.compile("(?<=[ \n\t\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef])")  # Chinese and Japanese have no blanks


def visible(text: str) -> str:
    """Return the text with control characters made visible, so that a model cannot control the user's terminal.

    C0 (without newline and tab) and DEL become control pictures (ESC is U+241B), C1 and the bidirectional overrides
    become escapes such as `\\x9b`. Each character is replaced by itself, so text may come in any pieces.
    """
    return text.translate(_VISIBLE)


class TextLayout:
    """Lays out text that a terminal gets in pieces; the last word is held back until it is known to fit its line.

    Attributes:
        column: cells that are used in the last line.
        exact: whether the cursor certainly stands there. Terminals measure some characters differently (joined emoji,
            spacing marks), break words that are longer than a line, and may or may not break lines again when resized.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self.column, self.exact = 0, True
        self._columns, self._width = columns, columns()
        self._word = ""

    def feed(self, text: str) -> str:
        """Return what is to be written now: the text so far, but for the last word."""
        if (width := self._columns()) != self._width:
            self._width, self.exact = width, self.exact and self.column == 0
        *words, self._word = _BREAK.split(self._word + visible(text))
        if len(self._word) > self._width:
            words, self._word = [*words, self._word], ""
        return "".join(map(self._placed, words))

    @property
    def holds_word(self) -> bool:
        """Return whether a word is held back that `rest` would return."""
        return bool(self._word)

    def rest(self) -> str:
        """Return the word that was held back: no more text follows it."""
        word, self._word = self._word, ""
        return self._placed(word)

    def unbroken(self, text: str) -> str:
        """Return text that brings its own line breaks, such as a table."""
        self.column, self.exact = (0, True) if text.endswith("\n") else (self.column, False)
        return visible(text)

    def _placed(self, word: str) -> str:
        """Return a word with the blank, tab or newline after it, on a new line if the present one lacks the room."""
        body = word.rstrip(" \n\t")
        end, room, cells = word[len(body) :], self._width - _MARGIN, cell_len(body)
        breaks = bool(body) and self.column > 0 and self.column + cells > room
        if breaks:
            self.column, self.exact = 0, True
        self.column += cells
        self.exact = self.exact and self.column < self._width and not any(map(_is_doubtful, body))
        if end == "\n":
            self.column, self.exact = 0, True
        elif end:
            blanks = _TAB - self.column % _TAB if end == "\t" else 1
            end = " " * min(blanks, max(room - self.column, 0))
            self.column += len(end)
        return "\n" * breaks + body + end


def _is_doubtful(char: str) -> bool:
    """Return whether terminals disagree on the width of this character or of its neighbours."""
    if char < "\u00ad":
        return False
    is_modifier = "\ufe00" <= char <= "\ufe0f" or "\U0001f3fb" <= char <= "\U0001f3ff"  # variation, skin tone
    is_flag = "\U0001f1e6" <= char <= "\U0001f1ff"
    return is_modifier or is_flag or unicodedata.category(char) in ("Cf", "Mc", "Me", "Cn", "Co")
