"""Bytes -> text: by a byte order mark, as UTF-8, else by charset-normalizer's best guess, with a warning."""

import codecs
from collections.abc import Callable

from offload.errors import PromptError
from offload.units import counted

# Longest first: the mark of UTF-32 LE begins with that of UTF-16 LE.
_MARKS = (
    *((mark, "utf-32") for mark in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    (codecs.BOM_UTF8, "utf-8-sig"),
    *((mark, "utf-16") for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)
_LEAST = 5  # valid characters of several bytes for each broken one: in other encodings, fewer look like UTF-8
_RARE = ["utf_7", "hp_roman8", "cp1006"]  # so rare that they are wrong when guessed


def decode(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    """Return the text of `data`, with CRLF and lone CR read as newlines, as Python's text files do.

    Its encoding is that of the byte order mark, UTF-8, or the best guess, which a warning names. Messages name the
    document as `name`. Raises PromptError for what is not text.
    """
    marked = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(marked)
    except UnicodeError as error:
        guessed = _guess(data, name, warn) if marked == "utf-8" else None
        if guessed is None:
            where = f" at byte {error.start:,}" if isinstance(error, UnicodeDecodeError) else ""
            hint = "give plain text, best saved as UTF-8; iconv converts other encodings"
            raise PromptError(f"{name} is not text: not valid {marked}{where}", hint) from None
        text = guessed
    if "\0" in text:
        raise PromptError(f"{name} is binary (it holds NUL bytes)", "give plain text; iconv converts other encodings")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _guess(data: bytes, name: str, warn: Callable[[str], None]) -> str | None:
    """Return the likeliest text, with a warning that says how it was read; None for what is likely no text."""
    text = data.decode("utf-8", "replace")  # of a text that was cut within a character, or of which a few are broken
    broken = text.count("\ufffd")
    if len(text) - len(text.encode("ascii", "ignore")) - broken >= _LEAST * broken:
        warn(f"{name} is UTF-8 with {counted(broken, 'broken character')}, read as U+FFFD")
        return text
    from charset_normalizer import from_bytes  # slow to import, seldom needed

    best, western = from_bytes(data, cp_exclusion=_RARE).best(), from_bytes(data, cp_isolation=["cp1252"]).best()
    if best is None:
        return None
    # Western text uses so few bytes above ASCII that many code pages fit it equally well.
    is_draw = western is not None and western.chaos <= best.chaos + 0.01 and western.coherence >= best.coherence - 0.1
    found = western if is_draw else best
    warn(f"{name} is not UTF-8; read as {found.encoding}, the best guess; iconv converts it from another")
    return str(found)
