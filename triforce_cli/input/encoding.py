"""Decodes the bytes of a document: its text, or an error that names the format of the bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from offload.errors import PromptError
from offload.units import counted

from .repair import Replaced, replace_broken, replace_broken_marked

# Longest first: the mark of UTF-32 LE begins with that of UTF-16 LE.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_PLAIN = "give plain text"
_UNPACK = "unpack it first and give the text inside"
_AS_MODEL = "model files go to --model; the prompt is plain text"
_BINARIES = (
    (b"%PDF-", "a PDF", "convert it to text first, such as: pdftotext book.pdf book.txt"),
    (b"PK\x03\x04", "a ZIP archive (or docx, odt, epub)", "unpack it, or save the document as plain text first"),
    (b"\x1f\x8b", "gzip-compressed", "unpack it first, such as: gzip -dc book.txt.gz | triforce generate …"),
    (b"BZh91AY&SY", "bzip2-compressed", _UNPACK),
    (b"\xfd7zXZ\x00", "xz-compressed", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", _UNPACK),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _PLAIN),
    (b"\xff\xd8\xff", "a JPEG image", _PLAIN),
    ((b"GGUF\x01", b"GGUF\x02", b"GGUF\x03"), "a GGUF model", _AS_MODEL),
)

# Never right for a document whose bytes are not UTF-8 and hold no NUL, or so rare that they are wrong when guessed.
_NOT_GUESSED = ["utf_7", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be", "hp_roman8", "cp1006"]
_HEAD = 20  # lines always given to the detector: they may declare the encoding
_CHAOS, _COHERENCE = 0.01, 0.1  # charset-normalizer's scores this close are a draw


def decode(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    """Return the text of `data`, with CRLF and lone CR read as newlines, as Python's text files do.

    UTF-8 with or without a byte order mark and UTF-16 and UTF-32 with one are read as they are, with U+FFFD for a few
    broken bytes; other bytes by the best guess. One warning counts what is broken, or names what is guessed.
    Messages name the document as `name`. Raises PromptError for what is not text.
    """
    _refuse_binary(data, name)
    text = _marked(data, name, warn)
    if text is None:
        if b"\0" in data:
            raise PromptError(f"{name} is binary (it holds NUL bytes)", _PLAIN)
        text = _unmarked(data, name, warn)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _refuse_binary(data: bytes, name: str) -> None:
    for magic, kind, hint in _BINARIES:
        if data.startswith(magic):
            raise PromptError(f"{name} is {kind}, not text", hint)
    if data[8:10] == b'{"' and int.from_bytes(data[:8], "little") < 2**32:
        raise PromptError(f"{name} is a safetensors file, not text", _AS_MODEL)


def _marked(data: bytes, name: str, warn: Callable[[str], None]) -> str | None:
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), None)
    if encoding is None:
        return None
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        label = encoding.removesuffix("-sig").upper()
        replaced = replace_broken_marked(data, encoding)
        if replaced is None:
            raise PromptError(
                f"{name} begins with the mark of {label} but is not valid {label} at byte {error.start:,}",
                "save it as UTF-8 again, or check whether the file is complete",
            ) from None
        text = _with_warning(replaced, label, name, warn)
    if "\0" in text:
        raise PromptError(f"{name} is binary (it holds NUL characters)", _PLAIN)
    return text


def _unmarked(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    replaced = replace_broken(data)
    if replaced is not None:
        return _with_warning(replaced, "UTF-8", name, warn)
    encoding = guess(data)
    if encoding is None:
        raise PromptError(f"{name} is binary or in an unknown encoding", "give plain text, best saved as UTF-8")
    warn(f"{name} is not UTF-8; read as {encoding}, the best guess")
    return data.decode(encoding)


def _with_warning(replaced: Replaced, label: str, name: str, warn: Callable[[str], None]) -> str:
    """Return the text, and warn of what was replaced in it."""
    count = counted(replaced.broken, "broken character")
    warn(f"{name} is {label} with {count}, {replaced.position}; read as U+FFFD")
    return replaced.text


def guess(data: bytes) -> str | None:
    """Return charset-normalizer's best guess, or None; a draw with cp1252, by far the commonest, goes to cp1252.

    Western text uses so few bytes above ASCII that many code pages fit it equally well.
    """
    from charset_normalizer import from_bytes  # slow to import, seldom needed

    # The detector takes a few samples of a long text, in which lines of pure ASCII are no evidence. All encodings that
    # are guessed use the same byte for a newline.
    lines = data.split(b"\n")
    sample = b"\n".join(line for number, line in enumerate(lines) if number < _HEAD or not line.isascii())
    matches = [m for m in from_bytes(sample, cp_exclusion=_NOT_GUESSED) if _decodes(data, m.encoding)]
    if not matches:
        return None
    best = matches[0]
    western = from_bytes(sample, cp_isolation=["cp1252"]).best()
    if western is not None and _decodes(data, "cp1252"):
        same = str(western) == str(best)
        draw = western.chaos <= best.chaos + _CHAOS and western.coherence >= best.coherence - _COHERENCE
        if same or draw:
            return "cp1252"
    return best.encoding


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding).encode("utf-8")  # the second half refuses lone surrogates
    except UnicodeError:
        return False
    return True
