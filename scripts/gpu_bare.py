"""Rehearse check_gpu.py as on a machine whose Python has little beside torch: all other packages are hidden."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

# What the check may miss. Torch and transformers bring the rest: pyyaml, jinja2, tokenizers, huggingface_hub, numpy.
HIDDEN = ("greenlet", "platformdirs", "gguf", "xxhash", "typer", "rich", "prompt_toolkit", "charset_normalizer")
HIDDEN += ("pytest", "hypothesis", "setuptools", "starlette", "uvicorn", "prometheus_client")


class _Hiding(MetaPathFinder):
    """A finder that does not find the hidden packages, and else what another one finds."""

    def __init__(self, finder: MetaPathFinder) -> None:
        self._finder = finder

    def find_spec(self, name: str, *more: object) -> ModuleSpec | None:
        """Return where a module is; None for a hidden one."""
        return None if name.partition(".")[0] in HIDDEN else self._finder.find_spec(name, *more)

    def __getattr__(self, name: str) -> object:
        return getattr(self._finder, name)


def hide() -> None:
    """Hide the packages from all imports that follow."""
    sys.meta_path[:] = [_Hiding(finder) for finder in sys.meta_path]


def is_missing(name: str) -> bool:
    """Return whether a package is not installed, or hidden."""
    return find_spec(name) is None
