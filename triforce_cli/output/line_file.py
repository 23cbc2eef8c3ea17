"""A file of JSON lines to which whole lines are appended, so that an interrupted run goes on after them."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from offload.errors import SettingsError

from .stdout_formats import json_line


class LineFile:
    """A file of lines of one kind. It is locked while it is open.

    Attributes:
        kept: what `keep` returned for each line that was there, in order.
    """

    def __init__(
        self,
        path: Path,
        option: str,
        what: str,
        keep: Callable[[Any], Any],
        warn: Callable[[str], None],
        types: Sequence[str],
        name: str | None = None,
    ) -> None:
        """Open or create the file, and drop a last line that was cut. Raises SettingsError, and changes no other file.

        What is no regular file, such as a named pipe, has nothing to resume from.

        Args:
            option: the option that names the file, for messages; `name` is the file's name in them.
            what: what a line is, for messages: "result of a batch".
            keep: returns what to keep of a line's value; None if it is not of this kind.
            types: the types with which lines of this kind begin, by which one that was cut is told from a foreign file.
        """
        self.kept: list[Any] = []
        self._name, self._option, self._what, self._keep = name or str(path), option, what, keep
        self._beginnings = [json_line(type=each).rstrip("}\n").encode() for each in types]
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or str(error)
            raise self._error(f"{reason[:1].lower()}{reason[1:]}", "name a file") from None
        try:
            if stat.S_ISREG(os.fstat(self._handle).st_mode):
                self._lock()
                with open(self._handle, "rb", closefd=False) as file:
                    self._resume(file, warn)
        except BaseException:
            self.close()
            raise

    def write(self, line: str) -> None:
        """Append a line whole, at once. Raises OSError."""
        data = line.encode()
        while data:
            data = data[os.write(self._handle, data) :]

    def close(self) -> None:
        os.close(self._handle)

    def _error(self, reason: str, hint: str = "name another file") -> SettingsError:
        return SettingsError(f"{self._option} {self._name}: {reason}", hint)

    def _lock(self) -> None:
        """Raise SettingsError if another run appends to the file."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._error("another run appends to it") from None
        except OSError:  # a file system without locks
            pass

    def _resume(self, file: IO[bytes], warn: Callable[[str], None]) -> None:
        """Keep what is finished, and mend the end of the file."""
        whole = 0
        for number, data in enumerate(file, 1):
            kept = self._kept(data)
            ended = data.endswith(b"\n")
            if kept is None and (ended or not self._is_cut(data)):
                raise self._error(f"line {number} is no {self._what}, and nothing is appended to it")
            if kept is None:
                os.ftruncate(self._handle, whole)
                warn(f"{self._name}: the last line was cut while it was written, and is dropped")
                return
            self.kept.append(kept)
            if not ended:
                os.write(self._handle, b"\n")
            whole += len(data)

    def _is_cut(self, data: bytes) -> bool:
        """Return whether a last line without its end is one of this kind that was cut, and no part of another file."""
        try:
            json.loads(data)
        except (ValueError, RecursionError):
            begins = any(data.startswith(each) or each.startswith(data) for each in self._beginnings)
            return begins or bool(self.kept)
        return False  # it is whole

    def _kept(self, data: bytes) -> Any:
        try:
            return self._keep(json.loads(data))
        except (ValueError, RecursionError):
            return None
