"""The results of a batch: a file of JSON lines, from which a run resumes that was interrupted or killed."""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.errors import SettingsError

from ..input.documents import Warn, name_of
from ..output.output_files import target_of
from ..output.stdout_formats import json_line
from .items import Id

RESULT, ERROR = TYPES = ("result", "error")  # of events


class ResultFile:
    """A file to which results are appended, each whole. A hidden file beside it is locked while it is open.

    Attributes:
        finished: the ids that have a result in it.
    """

    def __init__(self, path: Path, warn: Warn) -> None:
        """Open or create the file, and drop a last line that was cut. Raises SettingsError, and changes no other file.

        What is not a regular file, such as a named pipe, has nothing to resume from.
        """
        self.finished: set[Id] = set()
        self._lock: Any = None
        self._name, self._warn = name_of(path), warn
        self._new = None if path.exists() else target_of(path)  # removed again if nothing is written to it
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - `close` closes it
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise self._error(getattr(error, "strerror", None) or str(error), "name a file") from None
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._acquire(path)
                self._resume()
        except BaseException:
            self.close()
            raise

    def write(self, line: str) -> None:
        """Append a line whole, at once. Raises OSError."""
        data = memoryview(line.encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error

    def close(self) -> None:
        """Close the file; remove it if it was created here and is empty, as after a request that was refused."""
        is_empty = not os.fstat(self._file.fileno()).st_size
        self._file.close()
        if self._new is not None and is_empty:
            self._new.unlink(missing_ok=True)
        if self._lock is not None:
            with suppress(OSError):  # Windows removes it itself
                os.unlink(self._lock.lock_file)  # before another run may lock it
            self._lock.release()

    def _error(self, reason: str, hint: str = "name another file") -> SettingsError:
        return SettingsError(f"--output {self._name}: {reason[:1].lower()}{reason[1:]}", hint)

    def _acquire(self, path: Path) -> None:
        """Raise SettingsError if another run appends to the file."""
        from filelock import FileLock, Timeout

        target = target_of(path)
        lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=0)
        try:
            lock.acquire()
            self._lock = lock
        except Timeout:
            raise self._error("another run appends to it") from None
        except (OSError, NotImplementedError):  # a file system without locks, or a folder without room for one
            pass

    def _resume(self) -> None:
        """Note the ids that are finished; drop a last line that was cut, or give it its end."""
        self._file.seek(0)
        *lines, last = self._file.read().split(b"\n")
        events = [_event(line) for line in lines]
        is_whole = not last or _event(last) is not None
        if last and is_whole:
            events.append(_event(last))
        starts = [json_line(type=kind).rstrip("}\n").encode() for kind in TYPES]
        is_cut = not _is_json(last) and (lines or any(last.startswith(x) or x.startswith(last) for x in starts))
        if not is_whole and not is_cut:
            events.append(None)  # of another kind of file
        if None in events:
            raise self._error(f"line {events.index(None) + 1} is not a batch result: nothing is appended")
        self.finished = {event["id"] for event in events if event and event["type"] == RESULT}
        if last and is_whole:
            self._file.write(b"\n")
        elif last:
            self._file.truncate(sum(len(line) + 1 for line in lines))
            self._warn(f"{self._name}: the last line was cut while it was written, and is dropped")


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line of a result file; None for any other line."""
    event = json.loads(line) if _is_json(line) else None
    if not isinstance(event, dict) or event.get("type") not in TYPES or "line" not in event:
        return None
    return event if isinstance(event.get("id"), str | int | float | None) else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def error_line(line: int, id: Id | None, message: str, hint: str) -> str:
    """Return the event of an item that failed."""
    return json_line(type=ERROR, id=id, line=line, message=message, hint=hint)
