"""PDF, EPUB, DOCX and HTML -> text, by markitdown where it is installed; formats are recognised by their bytes.

Documents are not trusted: a few kilobytes can be made to unpack to gigabytes. They are unpacked and converted in a
process with limits of memory and time, by conversion.py.
"""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec

from offload.errors import PromptError
from offload.system.limited_process import LimitedProcesses, LimitExceeded, Limits, Refused
from offload.units import GIB

from .conversion import ARCHIVE, NOT_INSTALLED
from .encoding import decode

_NAMES = {".pdf": "a PDF", ".epub": "an EPUB", ".docx": "a DOCX document", ".html": "an HTML page"}
_HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_COMMENT = rb"<!--(?:(?!-->).)*-->\s*"
_HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(%b)*(<!doctype html|<html)\b" % _COMMENT, re.IGNORECASE | re.DOTALL)
_HEAD = 1024  # bytes before which a PDF may begin, and within which an HTML page must say that it is one
_INSTALL = 'install it in the folder of triforce: pip install ".[documents]"'
_BY_HAND = {
    ".pdf": "; or convert it first, such as: pdftotext book.pdf book.txt",
    ".html": "; or give its source as it is, with the suffix .txt",
}
_BOMB = "it may be made to use up this machine's memory; if you trust it, turn it into text with another program"
# The most that a conversion may take, with its unpacked bytes. Of a novel, a PDF takes 70 s a MiB, and others 2 s.
_MEMORY, _BYTES_EACH = GIB, 16
_SECONDS, _MOST_SECONDS = 30, 3600
_SECONDS_PER_MIB = {".pdf": 240, ".epub": 10, ".docx": 10, ".html": 10}


def converting_processes() -> LimitedProcesses:
    """Return processes for `text_of`, none of which has started."""
    return LimitedProcesses(f"{__package__}.conversion:answer")


_processes = converting_processes()


def text_of(
    data: bytes,
    name: str,
    suffix: str,
    warn: Callable[[str], None],
    encoding: str | None = None,
    processes: LimitedProcesses = _processes,
) -> str:
    """Return the text of a document in any known format; `suffix` is that of its file, "" where it has none.

    `encoding` is that of a text; None guesses it. Documents of people who do not trust each other should not meet in
    the same `processes`.

    Raises PromptError for what cannot be read, contains no text, or does not match its suffix.
    """
    found = _recognised(data, name, suffix.lower(), processes)
    return decode(data, name, warn, encoding) if found is None else _converted(data, name, *found, processes)


def end_conversions() -> None:
    """End the process that converts documents, which waits for the next one until then."""
    _processes.close_idle()


def _recognised(data: bytes, name: str, suffix: str, processes: LimitedProcesses) -> tuple[str, int] | None:
    """Return the format's usual suffix and the unpacked bytes; None for text, and for binaries that `decode` refuses.

    Raises PromptError.
    """
    if data.lstrip().startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in data[:_HEAD]):
        return ".pdf", len(data)
    if data.startswith(b"PK\x03\x04"):
        kind, size = _inside_archive(data, name, processes)
        if kind:
            return kind, size
    if suffix in (".pdf", ".epub", ".docx"):
        raise PromptError(
            f"{name} is not {_NAMES[suffix]}, although its name says so, or it is corrupt",
            "check whether the file is complete; give a text file the suffix .txt",
        )
    # A page's source is text too: the suffix .txt asks for it.
    if suffix in _HTML_SUFFIXES or (not suffix and _HTML.match(data[:_HEAD].removeprefix(b"\xef\xbb\xbf"))):
        return ".html", len(data)
    return None


def _inside_archive(data: bytes, name: str, processes: LimitedProcesses) -> tuple[str, int]:
    """Return the kind of a document in an archive, "" for none, and its unpacked bytes. Raises PromptError."""
    limits = Limits(_MEMORY // 4 + 2 * len(data), _SECONDS)
    kind, size = json.loads(_answer(data, name, ARCHIVE, limits, processes))
    return kind, size


def _converted(data: bytes, name: str, kind: str, size: int, processes: LimitedProcesses) -> str:
    """Return the text of a document of `size` bytes, unpacked. Raises PromptError."""
    if find_spec("markitdown") is None:
        raise _not_installed(name, kind)
    seconds = _SECONDS + _SECONDS_PER_MIB[kind] * size / 2**20
    limits = Limits(_MEMORY + _BYTES_EACH * size, min(seconds, _MOST_SECONDS))
    text = _tidied(_answer(data, name, kind, limits, processes).decode("utf-8", "surrogatepass"))
    if not text:
        raise PromptError(
            f"{name} is {_NAMES[kind]} without any text in it",
            "if its pages are pictures (a scan), run OCR on it first, such as: ocrmypdf",
        )
    return text


def _answer(data: bytes, name: str, kind: str, limits: Limits, processes: LimitedProcesses) -> bytes:
    """Return what the process answers about a document. Raises PromptError."""
    what = _NAMES.get(kind, "an archive")
    try:
        return processes.call(kind.encode() + b"\n" + data, limits)
    except LimitExceeded as error:
        raise PromptError(f"{name} is {what} that {error}", _BOMB + _BY_HAND.get(kind, "")) from None
    except Refused as error:
        if str(error) == NOT_INSTALLED:
            raise _not_installed(name, kind) from None
        hint = _BOMB if kind == ARCHIVE else "it may be corrupt, cut off or protected" + _BY_HAND.get(kind, "")
        raise PromptError(f"{name} is {what} that cannot be read: {error}", hint) from None


def _not_installed(name: str, kind: str) -> PromptError:
    return PromptError(
        f"{name} is {_NAMES[kind]}, and the package that reads it is not installed", _INSTALL + _BY_HAND.get(kind, "")
    )


def _tidied(text: str) -> str:
    """Return the text without form feeds, trailing blanks, and more than one blank line in a row."""
    lines = [line.rstrip() for line in text.replace("\f", "\n\n").splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
