"""The lines of a batch, read one by one: a million of them need no memory."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from offload.errors import PromptError
from offload.system.bounded_yaml import Unbounded, copy_bounded
from offload.units import GIB

from ..input.documents import PROMPT_HINT, STDIN, Warn, is_terminal, name_of, unreadable
from .request import LineError, LineRequest, parse_line

LONGEST_LINE = GIB  # bytes, as of a document
MOST_PIPED = 64 * GIB  # bytes of a pipe, which are kept in a temporary file
_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line that is not blank: its number, where it begins in the file, and its bytes, cut at `LONGEST_LINE`."""

    number: int
    start: int
    data: bytes

    def request(self) -> LineRequest:
        """Return the line's request. Raises LineError."""
        if len(self.data) > LONGEST_LINE:
            error = PromptError(f"longer than {LONGEST_LINE:,} bytes", "give one prompt a line")
            raise LineError(self.number, None, error)
        return parse_line(self.data, self.number)

    def packed(self) -> tuple[int, int, str]:
        """Return the line for JSON, whatever its bytes are."""
        return self.number, self.start, self.data.decode("utf-8", "surrogateescape")

    @classmethod
    def unpacked(cls, number: int, start: int, text: str) -> Line:
        """Return a line that was packed."""
        return cls(number, start, text.encode("utf-8", "surrogateescape"))


class BatchFile:
    """A file of lines that can be read several times, one reader after the other.

    Attributes:
        name: for people.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self.name = file, name

    def lines(self) -> Iterator[Line]:
        """Yield all lines that are not blank, from the first one on."""
        self._file.seek(0)
        number, start = 0, 0
        while data := self._file.readline(LONGEST_LINE + 1):
            number += 1
            end = self._behind_line(data)
            if number == 1:
                data = data.removeprefix(_MARK)
            if data.strip():
                yield Line(number, start, data)
            start = end

    def line_at(self, number: int, start: int) -> Line:
        """Return a line that `lines` has yielded. It moves the reader."""
        self._file.seek(start)
        data = self._file.readline(LONGEST_LINE + 1)
        return Line(number, start, data.removeprefix(_MARK) if number == 1 else data)

    def close(self) -> None:
        self._file.close()

    def _behind_line(self, data: bytes) -> int:
        """Skip what is left of a line that is too long; return where the next one begins."""
        while len(data) > LONGEST_LINE and not data.endswith(b"\n"):
            data = self._file.readline(LONGEST_LINE + 1)
        return self._file.tell()


def open_batch(path: str, stdin: Any, warn: Warn) -> BatchFile:
    """Open a file of lines, or standard input for `-`; what cannot be read twice is copied to a temporary file.

    Raises PromptError.
    """
    if path == str(STDIN):
        if stdin is None:
            raise PromptError("standard input is closed", PROMPT_HINT)
        return BatchFile(_copy(getattr(stdin, "buffer", stdin), stdin, name_of(STDIN), warn), name_of(STDIN))
    name = name_of(Path(path))
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - the BatchFile closes it
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return BatchFile(file, name)
        with file:
            return BatchFile(_copy(file, file, name, warn), name)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(Path(path), error) from None


def _copy(source: Any, stream: Any, name: str, warn: Warn) -> IO[bytes]:
    if is_terminal(stream):
        warn("reading from the terminal; end it with Ctrl-D")
    copied = tempfile.TemporaryFile()  # noqa: SIM115 - the BatchFile closes it
    try:
        copy_bounded(source, copied, MOST_PIPED)
    except Unbounded as error:
        raise PromptError(f"{name} {error}", error.hint) from None
    return copied
