"""Sizes and counts as people write and read them."""

import re

from .errors import SettingsError
from .short_repr import short_repr

GIB = 2**30
MOST_TOKENS = 2**40  # that any context or setting may have
MOST_BYTES = 2**60

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of a size as people write it: "22GiB", "22 GB", "500m", "1.5T". Raises SettingsError."""
    match = _SIZE.fullmatch(text.strip())
    number, letter, binary = match.groups() if match else ("inf", "", "")
    size = float(number) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " ")
    if not size <= MOST_BYTES:
        wrong = f"more than {MOST_BYTES:,} bytes" if match else "not a size"
        raise SettingsError(f"{short_repr(text)} is {wrong}", "write it like 22GiB, 24GB or 500MiB")
    return int(size)


_TOKENS = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s*([km]?)", re.IGNORECASE)


def parse_tokens(text: str) -> int:
    """Return tokens as people write them: "128K" is 131,072, "1M" 1,048,576, "8000" 8,000. Raises SettingsError."""
    match = _TOKENS.fullmatch(text.strip())
    count = 0 if match is None else float(re.sub("[,_]", "", match[1])) * 1024 ** " km".index(match[2].lower() or " ")
    if not 1 <= count <= MOST_TOKENS or count != int(count):
        wrong = f"more than {MOST_TOKENS:,} tokens" if count > MOST_TOKENS else "not a number of tokens"
        raise SettingsError(f"{short_repr(text)} is {wrong}", "write it like 8000, 128K or 1M")
    return int(count)


_SMALL = ((2**20, "MiB"), (2**10, "KiB"))


def size_text(count: int) -> str:
    """Return bytes as messages have them: `1.50 GiB`, `350.0 MiB`, `12.3 KiB`, `5 B`."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return next((f"{count / size:.1f} {name}" for size, name in _SMALL if count >= size), f"{count} B")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 token`, `1,200 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
