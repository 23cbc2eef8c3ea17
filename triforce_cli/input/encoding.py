"""Decodes the bytes of a document: its text, repaired if few are broken, or an error with their format."""

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from encodings.aliases import aliases

from offload.errors import PromptError, SettingsError
from offload.short_repr import short_repr
from offload.units import counted

from .guess import guess

# Longest first: the mark of UTF-32 LE begins with that of UTF-16 LE.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

ANOTHER = "; --encoding names another"  # what a warning of a guess ends with
_PLAIN = "give plain text"
_UNPACK = "unpack it first and give the text inside"
_AS_MODEL = "model files go to --model; the prompt is plain text"
_BINARIES = (
    (b"%PDF-", "a PDF", "convert it to text first, such as: pdftotext book.pdf book.txt"),
    (b"PK\x03\x04", "a ZIP archive (or docx, odt, epub)", "unpack it, or save the document as plain text first"),
    (b"\x1f\x8b", "gzip-compressed", "unpack it first, such as: gzip -dc book.txt.gz | triforce generate"),
    (b"BZh91AY&SY", "bzip2-compressed", _UNPACK),
    (b"\xfd7zXZ\x00", "xz-compressed", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", _UNPACK),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _PLAIN),
    (b"\xff\xd8\xff", "a JPEG image", _PLAIN),
    ((b"GGUF\x01", b"GGUF\x02", b"GGUF\x03"), "a GGUF model", _AS_MODEL),
)

# Codecs of Python's that read no document, or not on every system.
_NO_DOCUMENTS = ("idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "mbcs", "oem")


def encoding_named(name: str) -> str:
    """Return Python's name of an encoding. Raises SettingsError with the nearest names for one that there is not."""
    try:
        found = codecs.lookup(name)
        if found.name.replace("-", "_") not in _NO_DOCUMENTS and found._is_text_encoding:
            return found.name
    except (LookupError, ValueError):  # ValueError: a NUL in the name
        pass
    names = sorted({*aliases, *aliases.values()})
    close = get_close_matches(name.lower().replace("-", "_"), names, n=3)
    near = f"did you mean {', '.join(close)}? Or use" if close else "use"
    raise SettingsError(
        f"--encoding {short_repr(name)} is no encoding", f"{near} a name such as utf-8, cp1252, utf-16 or shift_jis"
    )


def decode(data: bytes, name: str, warn: Callable[[str], None], encoding: str | None = None) -> str:
    """Return the text of `data`, with CRLF and lone CR read as newlines, as Python's text files do.

    With an `encoding`, that one. Without, UTF-8 with or without a byte order mark and UTF-16 and UTF-32 with one are
    read as they are, with U+FFFD for a few broken bytes; other bytes by the best guess. One warning counts what is
    broken, or names what is guessed. Messages name the document as `name`. Raises PromptError for what is not text.
    """
    _refuse_binary(data, name)
    text = _marked(data, name, warn) if encoding is None else _as(encoding, data, name)
    if text is None:
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


def _as(encoding: str, data: bytes, name: str) -> str:
    """Return the text of bytes in an encoding that the user has named."""
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
        text.encode("utf-8")  # refuses lone surrogates
    except UnicodeError as error:
        where = f" at byte {error.start:,}" if isinstance(error, UnicodeDecodeError) else ""
        hint = "leave --encoding out to have it guessed, or name another one"
        raise PromptError(f"{name} is not valid {encoding}{where}", hint) from None
    if "\0" in text:
        raise PromptError(f"{name} is no text as {encoding}: it holds NUL characters", "name another --encoding")
    return text


def _unmarked(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    is_binary = b"\0" in data
    try:
        text = data.decode("utf-8")
        if not is_binary:
            return text
    except UnicodeDecodeError:
        pass
    replaced = None if is_binary else replace_broken(data)
    if replaced is not None:
        return _with_warning(replaced, "UTF-8", name, warn)
    encoding = guess(data)
    if encoding is None:
        if is_binary:
            raise PromptError(f"{name} is binary (it holds NUL bytes)", _PLAIN)
        raise PromptError(f"{name} is binary or in an unknown encoding", "give plain text, best saved as UTF-8")
    warn(f"{name} is not UTF-8; read as {encoding}, the best guess{ANOTHER}")
    return data.decode(encoding)


@dataclass(frozen=True, slots=True)
class Replaced:
    """A text in which U+FFFD stands for `broken` characters; `position` says where they are."""

    text: str
    broken: int
    position: str


def _with_warning(replaced: Replaced, label: str, name: str, warn: Callable[[str], None]) -> str:
    """Return the text, and warn of what was replaced in it."""
    count = counted(replaced.broken, "broken character")
    warn(f"{name} is {label} with {count}, {replaced.position}; read as U+FFFD")
    return replaced.text


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
