"""Threads that encode prompts, apart from the event loop, which can be left alone when the server ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


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
            result, failure = None, None
            try:
                result = function(*args)
            except Exception as error:
                failure = error
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
