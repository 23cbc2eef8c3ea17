"""Triton's interpreter without work that it repeats: half of the time of its tests, and no result changes."""

import inspect
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

NAMES = ("GridExecutor", "interpreter_builder", "_patch_lang")  # private, so that another version may lack them


@contextmanager
def quick_interpreter():
    """Leave out checks whose outcome nobody reads, and replace Triton's language once a launch.

    The interpreter computes every 32-bit sum and product again in 64 bits, for an assertion that it drops unless it
    debugs; and with every call of a device function it replaces all of Triton's language, which the launch has done.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in NAMES):
        yield
        return
    original, launch, seen = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @cache
    def languages(fn):
        known = (interpreter.tl, interpreter.tl.core)
        return frozenset(id(value) for value in fn.__globals__.values() if inspect.ismodule(value) and value in known)

    def patch_once(fn):
        if languages(fn) in seen:
            return SimpleNamespace(restore=lambda: None)
        seen.add(languages(fn))
        return original(fn)

    def launch_anew(self, *args, **kwargs):
        seen.clear()
        return launch(self, *args, **kwargs)

    builder = interpreter.interpreter_builder
    options = builder.options if builder.options.debug else replace(builder.options, sanitize_overflow=False)
    with (
        patch.object(interpreter, "_patch_lang", patch_once),
        patch.object(interpreter.GridExecutor, "__call__", launch_anew),
        patch.object(builder, "options", options),
    ):
        yield
