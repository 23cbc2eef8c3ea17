"""Waiting for what another thread or process does, however long a busy machine takes."""

import time


def until(condition, seconds=60.0):
    """Wait until `condition()` is true and return True; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
    return True
