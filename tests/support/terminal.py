"""Pseudo-terminals for tests, and an emulator of the screen that they would show."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
import time
from typing import IO

from rich.cells import cell_len

_END = b"\x00end of output\x00"


class Pty:
    """A pseudo-terminal of a given size. `output` closes it and returns everything written to it."""

    def __init__(self, columns: int = 60, rows: int = 12) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(columns, rows)
        self._streams: list[IO[str]] = []
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(
            target=self._read, daemon=True
        )  # drains the buffer, which would block writers when full
        self._reader.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def stream(self, mode: str = "w") -> IO[str]:
        self._streams.append(open(os.dup(self._slave), mode, encoding="utf-8"))  # noqa: SIM115 - close() does
        return self._streams[-1]

    def type(self, text: str) -> None:
        """Type on the keyboard."""
        os.write(self._master, text.encode())

    def written(self) -> bytes:
        """Return the bytes written so far."""
        return b"".join(self._chunks)

    def output(self) -> str:
        for stream in self._streams:
            stream.close()
        self._drain()
        os.close(self._slave)
        self._reader.join(timeout=10)
        os.close(self._master)
        return self.written().removesuffix(_END).decode().replace("\r\n", "\n")

    def _drain(self) -> None:
        """Wait until everything written is read: what is on its way when the last writer closes can be lost."""
        os.write(self._slave, _END)
        give_up = time.monotonic() + 30
        while not self.written().endswith(_END) and time.monotonic() < give_up:
            time.sleep(0.001)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:  # EIO: the last writer has closed
                return
            if not chunk:
                return
            self._chunks.append(chunk)


_TOKEN = re.compile(r"\x1b\[[\d;]*[A-Za-z]|\x1b.|.", re.DOTALL)


class Screen:
    """A strict terminal emulator, with the least forgiving behaviour that terminals have.

    Erasing in pending wrap erases the last character. Every movement ends the pending wrap, and so do saving and
    restoring the cursor. A newline includes a carriage return, as in a tty's output. Rows that scroll off the top stay
    in `lines`.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._top = 0
        self._cells: dict[tuple[int, int], str] = {}
        self._row = self._column = 0
        self._pending = False
        self._saved = (0, 0)

    def feed(self, text: str) -> Screen:
        for token in _TOKEN.findall(text):
            self._put(token) if token >= " " else self._control(token)
        return self

    def lines(self) -> list[str]:
        """Return all rows, scrolled off or not, without trailing blanks."""
        last = max((row for row, _ in self._cells), default=-1)
        rows = ["".join(self._cells.get((row, c), " ") for c in range(self._columns)) for row in range(last + 1)]
        return "\n".join(row.rstrip() for row in rows).rstrip("\n").split("\n")

    def _put(self, char: str) -> None:
        cells = cell_len(char)
        if cells == 0:
            return
        if self._pending or self._column + cells > self._columns:
            self._down()
            self._column, self._pending = 0, False
        self._cells[self._row, self._column] = char
        for extra in range(1, cells):
            self._cells[self._row, self._column + extra] = ""
        self._column += cells
        if self._column >= self._columns:
            self._column, self._pending = self._columns - 1, True

    def _down(self) -> None:
        self._row += 1
        self._top = max(self._top, self._row - self._rows + 1)

    def _control(self, token: str) -> None:
        if token.endswith("m") and token.startswith("\x1b["):
            return
        if token in ("\x1b[J", "\x1b[K"):
            for at in list(self._cells):
                if (at[0] == self._row and at[1] >= self._column) or (token == "\x1b[J" and at[0] > self._row):
                    del self._cells[at]
            return
        self._pending = False
        self._move(token)

    def _move(self, token: str) -> None:
        if token == "\n":
            self._down()
            self._column = 0
        elif token == "\x1bD":
            self._down()
        elif token == "\r":
            self._column = 0
        elif token == "\t":
            self._column = min((self._column // 8 + 1) * 8, self._columns - 1)
        elif token == "\x1b[A":
            self._row = max(self._row - 1, self._top)
        elif token == "\x1b[B":
            self._row = min(self._row + 1, self._top + self._rows - 1)
        elif token.endswith("C"):
            self._column = min(self._column + int(token[2:-1]), self._columns - 1)
        elif token == "\x1b7":
            self._saved = (self._row, self._column)
        elif token == "\x1b8":
            self._row, self._column = self._saved
        else:
            raise AssertionError(f"unexpected control {token!r}")


def stream() -> io.TextIOWrapper:
    """Return a text stream in memory, as a pipe would be; `written` returns its text."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def written(stream: io.TextIOWrapper) -> str:
    return stream.buffer.getvalue().decode()
