"""The main function of the child process that converts a document to text, by pdfium and markitdown."""

import io
import json
import re
import sys
import zlib
from contextlib import suppress
from posixpath import dirname, join, normpath
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote
from zipfile import BadZipFile, ZipFile

from offload.errors import PromptError
from offload.system.platform import limit_address_space

from .encoding import decode

_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_PACKAGE = "application/oebps-package+xml"
_FACTS = {"Title": "title", "Author": "creator"}  # of a book, by their tags
_CONVERTERS = {".docx": "DocxConverter", ".html": "HtmlConverter"}


def convert(kind: str, memory: int) -> None:
    """Extract from the document on standard input, and write the result to standard output as JSON.

    `memory`: the bytes of address space that it may take.
    """
    limit_address_space(memory)
    data, output = sys.stdin.buffer.read(), sys.stdout.buffer
    sys.stdout = sys.stderr  # where a parser may print
    output.write(json.dumps(extract(kind, data)).encode())


def extract(kind: str, data: bytes) -> tuple[str, list[str]]:
    """Return the text of a document, blank for pictures alone, and the names of its pages or chapters without any.

    The converter is called directly: markitdown's dispatcher would pass a corrupt file on to the next that accepts it.
    """
    if kind in (".epub", ".pdf"):
        return _epub(data) if kind == ".epub" else _pdf(data)
    text = _markdown(kind, data)
    return text if _has_words(text) else "", []


def _has_words(markdown: str) -> bool:
    """Return whether there is anything in a text but pictures."""
    return bool(_PICTURE.sub("", markdown).strip())


def _markdown(kind: str, data: bytes) -> str:
    from bs4.dammit import EncodingDetector
    from markitdown import StreamInfo, converters

    if kind == ".html" and EncodingDetector.find_declared_encoding(data, is_html=True) is None:
        with suppress(PromptError):  # bytes that are no text
            data = decode(data, "", lambda warning: None).encode()
    text = getattr(converters, _CONVERTERS[kind])().convert(io.BytesIO(data), StreamInfo(extension=kind)).markdown
    return str(text).encode("utf-8", "replace").decode()


def _pdf(data: bytes) -> tuple[str, list[str]]:
    """Return the text of all pages, with words that a line's end divides in one, and the names of pages without any."""
    from pypdfium2 import PdfDocument, PdfiumError

    document, pages = PdfDocument(data), list[str]()
    for number in range(len(document)):
        pages.append("")
        with suppress(PdfiumError):  # a damaged page
            pages[-1] = document[number].get_textpage().get_text_range().replace("\ufffe", "")
    unread = [f"page {number}" for number, page in enumerate(pages, 1) if not page.strip()]
    return "\n\n".join(pages), unread


class _Archive:
    """The files of an EPUB by the names in its documents, which may differ in capitals, slashes and escapes."""

    def __init__(self, data: bytes) -> None:
        self._zip = ZipFile(io.BytesIO(data))
        self._names = {self._key(name): name for name in self._zip.namelist()}

    @staticmethod
    def _key(path: str) -> str:
        return normalize("NFC", path.replace("\\", "/")).casefold()

    def find(self, reference: str, folder: str = "") -> str | None:
        """Return the name of the file that a reference in a document of `folder` leads to; None without one."""
        for path in (unquote(re.split("[#?]", reference)[0]), reference):
            name = self._key(normpath(join(folder, path.replace("\\", "/"))).lstrip("/"))
            if name in self._names:
                return self._names[name]
        return None

    def xml(self, name: str) -> Any:
        from defusedxml.ElementTree import fromstring

        return fromstring(self._zip.read(name).lstrip())

    def chapter(self, name: str | None) -> tuple[str, str]:
        """Return the text of a page, or else why there is none."""
        if name is None:
            return "", "not in the file"
        try:
            text = _markdown(".html", self._zip.read(name))
        except (BadZipFile, EOFError, zlib.error):
            return "", "damaged"
        return (text, "") if _has_words(text) and "\0" not in text else ("", "no text")  # NUL: a picture, or encrypted


def _epub(data: bytes) -> tuple[str, list[str]]:
    """Return the title, the authors and the chapters in the order of the spine; and the chapters without text.

    Raises ValueError for an encrypted book, and one without a list of chapters.
    """
    archive = _Archive(data)
    container = archive.find("META-INF/container.xml")
    roots = archive.xml(container).findall(".//{*}rootfile") if container else []
    roots.sort(key=lambda root: root.get("media-type") != _PACKAGE)  # others are the book in other formats
    opf = archive.find(roots[0].get("full-path", "")) if roots else None
    if not opf:
        raise ValueError("it has no list of chapters")
    package, folder, locked = archive.xml(opf), dirname(opf.replace("\\", "/")), _encrypted(archive)
    items = {item.get("id"): item.get("href", "") for item in package.findall(".//{*}manifest/{*}item")}
    spine = [each.get("idref", "") for each in package.findall(".//{*}spine/{*}itemref")]
    if not spine:
        raise ValueError("it has no list of chapters")
    texts, unread = [], []
    for reference in dict.fromkeys(items.get(each, each).partition("#")[0] for each in spine):  # a file is read once
        name = archive.find(reference, folder)
        if name in locked:
            raise ValueError("it is encrypted")
        text, why = archive.chapter(name)
        texts.append(text)
        unread += [f"{reference} ({why})"] if why else []
    if not _has_words("".join(texts)):
        return "", unread
    facts = [(label, package.findall(f".//{{*}}metadata/{{*}}{tag}")) for label, tag in _FACTS.items()]
    head = [f"**{label}:** {', '.join(each.text or '' for each in found)}" for label, found in facts if found]
    return "\n\n".join((*head, *texts)), unread


def _encrypted(archive: _Archive) -> set[str | None]:
    """Return the names of the encrypted files: in books without DRM too, some fonts."""
    name = archive.find("META-INF/encryption.xml")
    found = archive.xml(name).findall(".//{*}CipherReference") if name else []
    return {archive.find(each.get("URI", "")) for each in found} - {None}
