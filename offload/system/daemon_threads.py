"""Threads that a process does not wait for at its end, unlike those of concurrent.futures: a signal can leave them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_POLL = 0.1  # seconds


def interruptible(call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises; it must release the interpreter's lock while it takes long.

    After an exception from a signal's handler, the call goes on in its thread, and its result is dropped: it must be
    safe to leave alone, until the process ends too. In other threads, which no signal reaches, it is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future: Future[T] = Future()
    threading.Thread(target=_deliver, args=(future, call), daemon=True).start()
    while not future.done():
        wait((future,), _POLL)
    return future.result()


def _deliver(future: Future[Any], work: Callable[..., Any], *arguments: Any) -> None:
    """Call `work`, and give the future what it returns or raises."""
    try:
        future.set_result(work(*arguments))
    except BaseException as error:
        future.set_exception(error)
