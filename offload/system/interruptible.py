"""Long calls into libraries that a signal can leave."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL = 0.1  # seconds


def interruptible(call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises; it must release the interpreter's lock while it takes long.

    After an exception from a signal's handler, the call goes on in its thread, and its result is dropped: it must be
    safe to leave alone, until the process ends too. In other threads, which no signal reaches, it is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL)
    if errors:
        raise errors[0]
    return results[0]
