"""Answers whose quotations are literal: what stands between two quotation marks " is a part of a document.

Blanks of any kind and number count as one space, since lines of a document are broken anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .matcher import Allowed

_MARK = b'"'
_OTHERS = tuple(mark.encode() for mark in "“”„‟«»")  # would be quotations that nobody checks: none is allowed
_BLANKS = re.compile(r"\s+")
_QUOTED = re.compile(r'"([^"]*)"')
_AHEAD = 32  # bytes of the longest token within a quotation


class Quotation(NamedTuple):
    """A quotation of an answer, and where the document has it first, in characters; -1 if it has not."""

    text: str
    start: int
    end: int


def quotations(answer: str, document: str) -> Iterator[Quotation]:
    """Yield the quotations of an answer, with their places in the document."""
    for found in _QUOTED.finditer(answer):
        pattern = r"\s+".join(map(re.escape, _BLANKS.split(found[1])))
        place = re.search(pattern, document)
        yield Quotation(found[1], *((-1, -1) if place is None else place.span()))


class _State(NamedTuple):
    """Within a quotation what it says so far, else None; the last bytes, if they may begin another kind of mark."""

    quoted: bytes | None = None
    tail: bytes = b""


class QuotableTokens:
    """The tokens of a vocabulary by their bytes, for the matchers of all documents."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """`tokens` are the bytes of each token, none for one that is not text."""
        self.data = tokens
        self.numbers: dict[bytes, list[int]] = {}  # of tokens without a quotation mark
        self.marked = [token for token, data in enumerate(tokens) if _MARK in data]
        for token, data in enumerate(tokens):
            if data and _MARK not in data and len(data) <= _AHEAD:
                self.numbers.setdefault(data, []).append(token)
        self.beginnings = {data[:length] for data in self.numbers for length in range(1, len(data) + 1)}


class QuoteMatcher:
    """Follows an answer, whose quotations must be parts of a document. Outside of them everything is allowed."""

    def __init__(self, document: str, tokens: QuotableTokens, eos: int) -> None:
        self._document = _BLANKS.sub(" ", document).encode()
        self._tokens, self._eos = tokens, eos
        # Those outside of quotations and at their beginnings: all others, one for each text, would fill the memory.
        self._masks: dict[_State, Allowed] = {}
        self._states = [_State()]

    def fork(self) -> QuoteMatcher:
        """Return another matcher of the same document, at the beginning of an answer."""
        other = object.__new__(QuoteMatcher)
        other.__dict__ |= self.__dict__ | {"_states": [_State()]}
        return other

    def consume(self, token: int) -> bool:
        data = self._tokens.data[token]
        state = self._after(self._states[-1], data) if data else None
        if state is not None:
            self._states.append(state)
        return state is not None

    def rollback(self, count: int) -> None:
        if count:
            del self._states[-count:]

    def allowed(self) -> Allowed:
        state = self._states[-1]
        if state.quoted:
            return self._inside(state.quoted)
        if state not in self._masks:
            self._masks[state] = self._outside(state) if state.quoted is None else self._inside(b"")
        return self._masks[state]

    def _after(self, state: _State, data: bytes) -> _State | None:
        """Return the state after some bytes; None if they are not allowed."""
        quoted, tail = state
        for at, part in enumerate(data.split(_MARK)):
            if at:  # a quotation begins or ends
                if quoted is not None and not (quoted.strip() and _is_whole(quoted)):
                    return None
                quoted, tail = (b"", b"") if quoted is None else (None, b"")
            if quoted is not None:
                quoted += part
                if quoted not in self._document or (quoted and _goes_on(quoted[0])):
                    return None
            else:
                tail += part
                if any(mark in tail for mark in _OTHERS):
                    return None
                tail = next((tail[-n:] for n in (2, 1) if any(mark.startswith(tail[-n:]) for mark in _OTHERS)), b"")
        return _State(quoted, tail)

    def _outside(self, state: _State) -> Allowed:
        allowed: Allowed = np.array([bool(data) and self._after(state, data) is not None for data in self._tokens.data])
        allowed[self._eos] = not state.tail
        return allowed

    def _inside(self, quoted: bytes) -> Allowed:
        """Return the tokens that go on with a quotation as the document does somewhere, or end it."""
        tokens, following = self._tokens, self._continuations(quoted)
        allowed: Allowed = np.zeros(len(tokens.data), dtype=bool)
        for length in range(1, _AHEAD + 1):
            following = {each for each in following if len(each) >= length and each[:length] in tokens.beginnings}
            for data in {each[:length] for each in following} & tokens.numbers.keys():
                allowed[tokens.numbers[data]] = True
        allowed[[token for token in tokens.marked if self._after(_State(quoted), tokens.data[token])]] = True
        return allowed

    def _continuations(self, quoted: bytes) -> set[bytes]:
        """Return what follows the places of a text in the document, up to the length of the longest token."""
        document, size = self._document, len(quoted)
        if not quoted:
            return {document[at : at + _AHEAD] for at in range(len(document)) if not _goes_on(document[at])}
        found, at = set(), document.find(quoted)
        while at >= 0:
            found.add(document[at + size : at + size + _AHEAD])
            at = document.find(quoted, at + 1)
        return found


def _goes_on(byte: int) -> bool:
    """Return whether a byte is one of a character in UTF-8, but for its first."""
    return byte & 0xC0 == 0x80


def _is_whole(text: bytes) -> bool:
    """Return whether a part of a text in UTF-8 that begins with a character ends with one."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
