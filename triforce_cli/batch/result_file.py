"""The results of a batch: a file of JSON lines, from which a run resumes that was interrupted or killed."""

from pathlib import Path
from typing import Any

from ..input.documents import Warn, name_of
from ..output.output_files import LineFile
from ..output.stdout_formats import json_line
from .batch_item import Id

RESULT, ERROR = "result", "error"  # types of events


class ResultFile(LineFile):
    """A file of results to which lines are appended.

    Attributes:
        finished: the ids that have a result in it.
    """

    def __init__(self, path: Path, warn: Warn) -> None:
        """Open or create the file, and drop a last line that was cut. Raises SettingsError, and changes no other file.

        What is no regular file, such as a named pipe, has nothing to resume from.
        """
        super().__init__(path, "--output", "result of a batch", _type_and_id, warn, (RESULT, ERROR), name_of(path))
        self.finished: set[Id] = {id for kind, id in self.kept if kind == RESULT}


def _type_and_id(event: Any) -> tuple[str, Id | None] | None:
    """Return the type and the id of an event of a result file; None if it is not one."""
    if not isinstance(event, dict) or event.get("type") not in (RESULT, ERROR) or "line" not in event:
        return None
    id = event.get("id")
    return (event["type"], id) if isinstance(id, str | int | float | None) else None


def error_line(line: int, id: Id | None, message: str, hint: str) -> str:
    """Return the event of an item that failed."""
    return json_line(type=ERROR, id=id, line=line, message=message, hint=hint)
