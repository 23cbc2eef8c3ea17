"""Short representations of values for error messages, cut with an ellipsis. Imports nothing heavy."""

import reprlib
from typing import Any

_MOST_BITS = 2048  # of an integer that is printed in digits; Python refuses to print thousands of digits


class _ShortRepr(reprlib.Repr):
    """A `reprlib.Repr` that cuts strings, numbers and collections, and never walks a large nested collection."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxother = 80
        self.maxlong = 40

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MOST_BITS:
            return f"<an integer of {x.bit_length()} bits>"
        return super().repr_int(x, level)


class _ShortJson(_ShortRepr):
    """A `_ShortRepr` of values of JSON."""

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"


def short_repr(value: Any) -> str:
    """Return `repr(value)`, cut to a few hundred characters."""
    return _REPR.repr(value)


def short_json(value: Any) -> str:
    """Return a value that came as JSON as `short_repr` does, with null, true and false."""
    return _JSON.repr(value)


def short_text(text: str) -> str:
    """Return a text in one line, cut to at most 300 characters with an ellipsis in the middle."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:200]}...{line[-90:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_REPR, _JSON = _ShortRepr(), _ShortJson()
