"""PDF, EPUB, DOCX and HTML -> text, by markitdown where it is installed; formats are recognised by their bytes.

The converter is called directly: markitdown's dispatcher would pass a corrupt file on to the next that accepts it.
"""

from __future__ import annotations

import io
import logging
import re
import zipfile
from collections.abc import Callable
from typing import Any

from offload.errors import PromptError

from .encoding import decode

_NAMES = {".pdf": "a PDF", ".epub": "an EPUB", ".docx": "a DOCX document", ".html": "an HTML page"}
_CONVERTERS = {".pdf": "PdfConverter", ".epub": "EpubConverter", ".docx": "DocxConverter", ".html": "HtmlConverter"}
_HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_COMMENT = rb"<!--(?:(?!-->).)*-->\s*"
_HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(%b)*(<!doctype html|<html)\b" % _COMMENT, re.IGNORECASE | re.DOTALL)
_HEAD = 1024  # bytes before which a PDF may begin, and within which an HTML page must say that it is one
_INSTALL = 'install it: pip install "triforce[documents]"'
_BY_HAND = {
    ".pdf": "; or convert it first, such as: pdftotext book.pdf book.txt",
    ".html": "; or give its source as it is, with the suffix .txt",
}


def text_of(data: bytes, name: str, suffix: str, warn: Callable[[str], None]) -> str:
    """Return the text of a document in any known format; `suffix` is that of its file, "" where it has none.

    Raises PromptError for what cannot be read, contains no text, or does not match its suffix.
    """
    kind = _recognised(data, name, suffix.lower())
    return decode(data, name, warn) if kind is None else _converted(data, name, kind)


def _recognised(data: bytes, name: str, suffix: str) -> str | None:
    """Return the format's usual suffix; None for text, and for binaries that `decode` refuses. Raises PromptError."""
    if data.lstrip().startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in data[:_HEAD]):
        return ".pdf"
    if data.startswith(b"PK\x03\x04") and (kind := _inside_archive(data)):
        return kind
    if suffix in (".pdf", ".epub", ".docx"):
        raise PromptError(
            f"{name} is not {_NAMES[suffix]}, although its name says so, or it is corrupt",
            "check whether the file is complete; give a text file the suffix .txt",
        )
    # A page's source is text too: the suffix .txt asks for it.
    if suffix in _HTML_SUFFIXES or (not suffix and _HTML.match(data[:_HEAD].removeprefix(b"\xef\xbb\xbf"))):
        return ".html"
    return None


def _inside_archive(data: bytes) -> str | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            if "META-INF/container.xml" in names:
                return ".epub"
            return ".docx" if "word/document.xml" in names else None
    except (zipfile.BadZipFile, OSError, ValueError):
        return None  # damaged, or no archive


def _converted(data: bytes, name: str, kind: str) -> str:
    try:
        import markitdown
        from markitdown import converters
    except ImportError:
        raise _not_installed(name, kind) from None
    logging.getLogger("pdfminer").setLevel(logging.CRITICAL)  # it would write to the terminal
    converter: Any = getattr(converters, _CONVERTERS[kind])()
    try:
        found = converter.convert(io.BytesIO(data), markitdown.StreamInfo(extension=kind)).markdown
    except markitdown.MissingDependencyException:
        raise _not_installed(name, kind) from None
    except Exception as error:  # each format's parser has its own exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PromptError(
            f"{name} is {_NAMES[kind]} that cannot be read: {reason}", "it may be corrupt, cut off or protected"
        ) from error
    text = _tidied(found)
    if not text:
        raise PromptError(
            f"{name} is {_NAMES[kind]} without any text in it",
            "if its pages are pictures (a scan), run OCR on it first, such as: ocrmypdf",
        )
    return text


def _not_installed(name: str, kind: str) -> PromptError:
    return PromptError(
        f"{name} is {_NAMES[kind]}, and the package that reads it is not installed", _INSTALL + _BY_HAND.get(kind, "")
    )


def _tidied(text: str) -> str:
    """Return the text without form feeds, trailing blanks, and more than one blank line in a row."""
    lines = [line.rstrip() for line in text.replace("\f", "\n\n").splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
