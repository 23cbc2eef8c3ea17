"""PDF, EPUB, DOCX and HTML -> text, in a child process with limits. The bytes tell the format."""

import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

from offload.errors import PromptError
from offload.short_repr import short_text
from offload.units import GIB, counted

from .encoding import decode

_NAMES = {".pdf": "a PDF", ".epub": "an EPUB", ".docx": "a DOCX document", ".html": "an HTML page"}
_MEMBERS = {"meta-inf/container.xml": ".epub", "word/document.xml": ".docx"}  # an archive's member that tells its kind
SUFFIXES = {*_NAMES, ".htm", ".xhtml", ".md", ".log"}  # of documents whose text is read
_HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_COMMENT = rb"<!--(?:(?!-->).)*-->\s*"
_HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(%b)*(<!doctype html|<html)\b" % _COMMENT, re.IGNORECASE | re.DOTALL)
_HEAD = 1024  # bytes before which a PDF may begin, and within which an HTML page must say that it is one
_PIECES, _SHOWN = {".pdf": "page", ".epub": "chapter"}, 5  # named in a warning
_BY_HAND = "or convert it first, such as: pdftotext book.pdf book.txt"
_SECONDS, _SECONDS_PER_MIB = 60, 60  # a large EPUB takes 10 s a MiB
_MEMORY = 4 * GIB  # a few kilobytes can be made to unpack to any size
_MISSING = b"MissingDependency", b"ModuleNotFoundError"  # without the package for one format


def text_of(data: bytes, name: str, suffix: str, warn: Callable[[str], None]) -> str:
    """Return the text of a document in any known format; `suffix` is that of its file, "" where it has none.

    Raises PromptError for what cannot be read, contains no text, or does not match its suffix.
    """
    kind = _kind(data, suffix.lower())
    if kind is None:
        return decode(data, name, warn)
    if kind not in _NAMES:
        raise PromptError(
            f"{name} is not {_NAMES[suffix.lower()]}, although its name says so, or it is corrupt",
            "check whether the file is complete; give a text file the suffix .txt",
        )
    text, unread = _converted(data, name, kind)
    if not text.strip():
        hint = "if its pages are pictures (a scan), run OCR on it first, such as: ocrmypdf"
        raise PromptError(f"{name} is {_NAMES[kind]} without any text in it", hint)
    if unread:
        shown = ", ".join(unread[:_SHOWN]) + (", ..." if len(unread) > _SHOWN else "")
        warn(f"{name}: {counted(len(unread), _PIECES[kind])} without text: {shown}")
    return _tidied(text)


def _kind(data: bytes, suffix: str) -> str | None:
    """Return the format's usual suffix, None for text, "" for bytes that are not what the suffix says."""
    if data.lstrip().startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in data[:_HEAD]):
        return ".pdf"
    if data.startswith(b"PK\x03\x04"):
        with suppress(zipfile.BadZipFile, OSError, ValueError), zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {member.replace("\\", "/").casefold() for member in archive.namelist()}
            for member, kind in _MEMBERS.items():
                if member in members:
                    return kind
    if suffix in (".pdf", ".epub", ".docx"):
        return ""
    # The source of a page is text too: the suffix .txt asks for it.
    if suffix in _HTML_SUFFIXES or (not suffix and _HTML.match(data[:_HEAD].removeprefix(b"\xef\xbb\xbf"))):
        return ".html"
    return None


def _converted(data: bytes, name: str, kind: str) -> tuple[str, list[str]]:
    """Return what `extract` does in a process of its own. Raises PromptError."""
    if find_spec("markitdown") is None:
        raise _not_installed(name, kind)
    module = f"{__package__}.conversion"
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import convert; convert({kind!r}, {_MEMORY})"
    seconds = _SECONDS + _SECONDS_PER_MIB * len(data) / 2**20
    try:
        process = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise PromptError(f"{name} is {_NAMES[kind]} that takes more than {seconds:.0f} s to read", _BY_HAND) from None
    if process.returncode == 0:
        text, unread = json.loads(process.stdout)
        return text, unread
    if any(name in process.stderr for name in _MISSING):
        raise _not_installed(name, kind)
    lines = process.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {process.returncode}"]
    reason, hint = (
        lines[-1].removeprefix("ValueError: "),
        f"it may be corrupt, cut off, protected or too large; {_BY_HAND}",
    )
    raise PromptError(f"{name} is {_NAMES[kind]} that cannot be read: {short_text(reason)}", hint)


def _not_installed(name: str, kind: str) -> PromptError:
    hint = f'install it in the folder of triforce: pip install ".[documents]"; {_BY_HAND}'
    return PromptError(f"{name} is {_NAMES[kind]}, and the package that reads it is not installed", hint)


def _tidied(text: str) -> str:
    """Return the text without form feeds, trailing blanks, and more than one blank line in a row."""
    lines = [line.rstrip() for line in text.replace("\f", "\n\n").splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
