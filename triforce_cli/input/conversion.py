"""PDF, EPUB, DOCX and HTML -> text, by markitdown: what runs in a process with limits (converters.py).

The converter is called directly: markitdown's dispatcher would pass a corrupt file on to the next that accepts it.
"""

import io
import json
import logging
import zipfile
from typing import Any

from offload.short_repr import short_text
from offload.system.limited_process import Refused
from offload.units import size_text

ARCHIVE = ".zip"  # what is asked about a file that may be an EPUB or a DOCX document
NOT_INSTALLED = "not installed"
_CONVERTERS = {".pdf": "PdfConverter", ".epub": "EpubConverter", ".docx": "DocxConverter", ".html": "HtmlConverter"}
_MEMBERS = {"META-INF/container.xml": ".epub", "word/document.xml": ".docx"}  # which formats have them
_MOST_ENTRIES = 10_000
_MOST_BYTES = 2**28  # of all entries
_MOST_RATIO = 100  # of unpacked to packed bytes, of an archive with more than
_SMALL = 2**24


def answer(request: bytes) -> bytes:
    """Return the text of a document, or the kind and the unpacked bytes of an archive as JSON.

    A request is a suffix, a newline and the bytes of a file. Raises Refused with a reason, or NOT_INSTALLED.
    """
    suffix, _, data = request.partition(b"\n")
    kind = suffix.decode()
    try:
        return _surveyed(data) if kind == ARCHIVE else _text(data, kind).encode("utf-8", "surrogatepass")
    except (MemoryError, Refused):
        raise
    except Exception as error:  # each format's parser has its own exceptions
        raise Refused(short_text(str(error)) or type(error).__name__) from error


def _surveyed(data: bytes) -> bytes:
    """Return what an archive is; nothing is unpacked. Raises Refused for what would be too much to unpack."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError):
        entries = []  # damaged, or no archive
    names = {entry.filename for entry in entries}
    kind = next((kind for member, kind in _MEMBERS.items() if member in names), "")
    total = sum(entry.file_size for entry in entries)
    if kind:
        _check_sizes(len(entries), total, len(data))
    return json.dumps([kind, total]).encode()


def _check_sizes(entries: int, total: int, packed: int) -> None:
    if entries > _MOST_ENTRIES:
        raise Refused(f"it has {entries:,} parts; at most {_MOST_ENTRIES:,} are read")
    if total > _MOST_BYTES:
        raise Refused(f"its parts unpack to {size_text(total)}; at most {size_text(_MOST_BYTES)} are read")
    if total > max(_SMALL, _MOST_RATIO * packed):
        times = total // packed
        raise Refused(
            f"its parts unpack to {size_text(total)}, {times:,} times its size; at most {_MOST_RATIO} are read"
        )


def _text(data: bytes, kind: str) -> str:
    try:
        import markitdown
        from markitdown import converters
    except ImportError:
        raise Refused(NOT_INSTALLED) from None
    logging.disable(logging.CRITICAL)  # formatting what nobody reads takes time
    converter: Any = getattr(converters, _CONVERTERS[kind])()
    source = io.BytesIO(data) if kind in (".pdf", ".html") else _unpacked(data)
    try:
        return converter.convert(source, markitdown.StreamInfo(extension=kind)).markdown
    except markitdown.MissingDependencyException:
        raise Refused(NOT_INSTALLED) from None


def _unpacked(data: bytes) -> io.BytesIO:
    """Return an archive with the same entries, uncompressed.

    Declared sizes may be lies: of each entry only as much is inflated as was declared, and its checksum must be right.
    A reader of the new archive cannot inflate more.
    """
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as packed, zipfile.ZipFile(target, "w") as archive:
        for name in dict.fromkeys(packed.namelist()):
            entry = packed.getinfo(name)
            with packed.open(entry) as source:
                archive.writestr(name, source.read(entry.file_size))
    target.seek(0)
    return target
