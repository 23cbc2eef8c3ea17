"""Files that the page sends -> their text, as the command line reads them. Nothing of them is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from offload.errors import PromptError
from offload.system.limited_process import LimitedProcesses

from ..input.converters import converting_processes, text_of
from ..input.encoding import ANOTHER
from .encoding_threads import EncodingThreads
from .errors import ApiError

MOST = 2  # that are read at a time: a conversion may take a GiB and a processor, which the model needs too
_LONGEST_NAME = 255  # characters


class Documents:
    """Reads documents in threads, each converted by a process of its own: one may be made to take that over."""

    def __init__(self, threads: EncodingThreads, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens` blocks, and raises ApiError for a text that is too long for the model."""
        self._threads, self._count_tokens = threads, count_tokens
        self._reading: set[LimitedProcesses] = set()

    async def read(self, data: bytes, name: str) -> dict[str, Any]:
        """Return the name, the text, its tokens, and warnings about how it was read. Raises ApiError.

        Cancelled, it ends the conversion.
        """
        if len(self._reading) >= MOST:
            message = f"{MOST} documents are being read already; try again soon"
            raise ApiError(503, message, "busy", None, "overloaded", {"retry-after": "2"})
        processes = converting_processes()
        self._reading.add(processes)
        try:
            return await self._threads.run(self._read, data, _shown(name), processes)
        finally:
            processes.end()
            self._reading.remove(processes)

    def end(self) -> None:
        """End all conversions."""
        for processes in self._reading:
            processes.end()

    def _read(self, data: bytes, name: str, processes: LimitedProcesses) -> dict[str, Any]:
        warnings: list[str] = []
        try:
            text = text_of(bytes(data), name, PurePath(name).suffix, warnings.append, processes=processes)
        except PromptError as error:
            raise ApiError(400, f"{error.message}; {error.hint}" if error.hint else error.message) from None
        if not text.strip():
            raise ApiError(400, f"{name} is empty; give a document with some text")
        return {
            "name": name,
            "text": text,
            "tokens": self._count_tokens(text),
            "warnings": [each.removesuffix(ANOTHER) for each in warnings],
        }


def _shown(name: str) -> str:
    """Return the last part of a file's name, its suffix with it, without characters that are not shown."""
    found = "".join(each for each in PurePath(name.replace("\\", "/")).name if each.isprintable())
    return found[-_LONGEST_NAME:] or "the document"
