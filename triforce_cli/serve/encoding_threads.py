"""Threads that encode prompts and read documents, apart from the event loop; a server that ends may abandon them."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from offload.errors import PromptError

from ..input.converters import text_of
from ..input.encoding import ANOTHER
from .api_errors import ApiError, busy


class EncodingThreads:
    """Runs functions that block, each in a daemon thread: the threads of asyncio would have to end before the process.

    To be used in one event loop.
    """

    def __init__(self) -> None:
        self._pending: dict[asyncio.Future[Any], threading.Thread] = {}
        self._abandoned: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether a thread still runs."""
        return any(thread.is_alive() for thread in (*self._pending.values(), *self._abandoned))

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns. Raises its errors."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def work() -> None:
            result: Any = None
            failure: Exception | None = None
            try:
                result = function(*args)
            except Exception as error:
                failure = error
            except BaseException as error:  # a panic in a library's Rust, for which nobody shall wait in vain
                failure = RuntimeError(f"{type(error).__name__}: {error}")
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, failure)

        thread = self._pending[future] = threading.Thread(target=work, name="encoding", daemon=True)
        thread.start()
        try:
            return await future
        finally:
            del self._pending[future]
            self._abandoned = [each for each in (*self._abandoned, thread) if each.is_alive()]

    def fail(self, error: Exception) -> None:
        """End the waiting for all that run, with an error."""
        for future in self._pending:
            _settle(future, None, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


MOST = 2  # that are read at a time: a conversion may take a GiB and a processor, which the model needs too
_LONGEST_NAME = 255  # characters


class Documents:
    """Reads documents in threads; formats other than text are converted in a process with a time limit."""

    def __init__(self, threads: EncodingThreads, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens` blocks, and raises ApiError for a text that is too long for the model."""
        self._threads, self._count_tokens = threads, count_tokens
        self._reading = 0

    async def read(self, data: bytes, name: str) -> dict[str, Any]:
        """Return the name, the text, its tokens, and warnings about how it was read. Raises ApiError.

        The place of one that nobody waits for any more is free when its thread has ended.
        """
        if self._reading >= MOST:
            raise busy(f"{MOST} documents are being read already; try again soon", 2)
        self._reading += 1
        reading = asyncio.ensure_future(self._threads.run(self._read, data, _shown(name)))

        def free(ended: asyncio.Future[dict[str, Any]]) -> None:
            self._reading -= 1
            _ = ended.cancelled() or ended.exception()  # else asyncio would report one that nobody waits for

        reading.add_done_callback(free)
        return await asyncio.shield(reading)

    def _read(self, data: bytes, name: str) -> dict[str, Any]:
        warnings: list[str] = []
        try:
            text = text_of(bytes(data), name, PurePath(name).suffix, warnings.append)
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
