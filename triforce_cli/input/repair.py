"""Repairs Unicode text with a few broken bytes: decides whether it still is text, and replaces them by U+FFFD."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What `tail -c` and `head -c` leave of a character that they cut.
_CUT_HEAD = re.compile(rb"\A[\x80-\xbf]{1,3}")
_CUT_TAIL = re.compile(rb"(?:[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z")
# Of a typographic quote or an emoji, which is enough alone: in cp1252 it would be "â€" or "ðŸ", "€™" or "Ÿ˜€".
_QUOTE_OR_EMOJI_HEAD = re.compile(rb"\A(?:\x80[\x80-\xbf]|\x9f[\x80-\xbf]{2})(?![\x80-\xbf])")
_QUOTE_OR_EMOJI_TAIL = re.compile(rb"(?:\xe2\x80|\xf0\x9f[\x80-\xbf]?)\Z")

_TWO_BYTES, _MORE_BYTES = (
    bytes(range(0xC2, 0xE0)),
    bytes(range(0xE0, 0xF5)),
)  # of characters, by their first byte
# In East Asian encodings, pairs that look like UTF-8 are frequent, triples are not: in hiragana as EUC-JP, there are
# up to three such pairs for a broken byte.
_WEIGHT = 5  # of a character of three or four bytes, against one of two
_LEAST = 10  # characters of two bytes that outweigh a broken one
_MOST_MARKED = 0.01  # share of broken characters, where a byte order mark has said what the others are


@dataclass(frozen=True, slots=True)
class Replaced:
    """A text in which U+FFFD stands for `broken` characters; `position` says where they are."""

    text: str
    broken: int
    position: str


def replace_broken(data: bytes) -> Replaced | None:
    """Return the text of what is most likely UTF-8 without a byte order mark, or None for what is likely not.

    Valid characters of several bytes must outnumber the broken ones by far. One character cut off at the beginning or
    at the end does not count as broken, if there is any sign of UTF-8 beside it; two count as one.
    """
    head, tail = _CUT_HEAD.search(data), _CUT_TAIL.search(data, max(0, len(data) - 3))
    core = data[head.end() if head else 0 : tail.start() if tail else None]
    text, broken = _replaced(core, "utf-8")
    signs = bool(_QUOTE_OR_EMOJI_HEAD.match(data) or _QUOTE_OR_EMOJI_TAIL.search(data, max(0, len(data) - 3)))
    weight = _weight(core) + signs
    if weight == 0 or weight < _LEAST * (broken + bool(head and tail)):
        return None
    cuts = [name for name, cut in (("beginning", head), ("end", tail)) if cut]
    position = f"at the {' and the '.join(cuts)}" if cuts and not broken else _first_broken(data, "utf-8")
    return Replaced("\ufffd" * bool(head) + text + "\ufffd" * bool(tail), broken + len(cuts), position)


def replace_broken_marked(data: bytes, encoding: str) -> Replaced | None:
    """Return the text of what begins with the byte order mark of `encoding`; None if much of it is broken."""
    text, broken = _replaced(data, encoding)
    if broken > 1 + _MOST_MARKED * len(text):
        return None
    return Replaced(text, broken, _first_broken(data, encoding))


def _replaced(data: bytes, encoding: str) -> tuple[str, int]:
    """Return the decoded text, and how many of its U+FFFD are replacements and not in the data."""
    text = data.decode(encoding, "replace")
    return text, text.count("\ufffd") - data.decode(encoding, "ignore").count("\ufffd")


def _weight(data: bytes) -> int:
    """Return the weight of the valid characters of several bytes, as evidence for UTF-8."""
    valid = data.decode("utf-8", "ignore").encode("utf-8")
    pairs = len(valid) - len(valid.translate(None, _TWO_BYTES))
    longer = len(valid) - len(valid.translate(None, _MORE_BYTES))
    return pairs + _WEIGHT * longer


def _first_broken(data: bytes, encoding: str) -> str:
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        mark = len(data) - len(error.object)  # which utf-8-sig has taken off
        return f"the first at byte {mark + error.start:,} of {len(data):,}"
    raise AssertionError("nothing is broken")
