"""The compiled kernel: its file, and its loading."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int32, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from .structs import LAYOUT, STRUCTS

LEVELS = ("avx512", "avx2", "bf16", "neon", "portable")  # the best first
FOLDER = Path(__file__).parent


class KernelUnavailable(Exception):
    """The native kernel cannot be used, and torch is used instead; the message says why."""


def library_path() -> Path:
    """Return the path of the compiled library beside this file. Raises KernelUnavailable if there is none."""
    for suffix in EXTENSION_SUFFIXES:
        path = FOLDER / f"_kernel{suffix}"
        if path.is_file():
            return path
    why, reason = "install triforce again where there is a C compiler", FOLDER / "build-error.txt"
    if reason.is_file():
        why = reason.read_text("utf-8").strip()
    raise KernelUnavailable(f"not built: {why}")


@cache
def open_library(path: Path | None = None) -> ctypes.CDLL:
    """Load and return this installation's library, or the build at `path`. Raises KernelUnavailable.

    It has threads of its own. How many, it asks the OpenMP runtime that torch has loaded, so that OMP_NUM_THREADS and
    `torch.set_num_threads` apply to both.
    """
    import torch  # noqa: F401  (its OpenMP runtime must be loaded first)

    try:
        library = ctypes.CDLL(str(path or library_path()))
    except OSError as error:
        raise KernelUnavailable(f"not loaded: {error}") from error
    _check_layout(library)
    library.triforce_level.argtypes, library.triforce_level.restype = (ctypes.c_char_p,), c_void_p
    library.triforce_run.argtypes = (c_void_p, c_int, c_void_p)
    library.triforce_linears.argtypes = (*(c_void_p,) * 4, c_int64, c_int64, c_int32, c_int32)
    library.triforce_limit_torch.argtypes, library.triforce_limit_torch.restype = (c_int,), None
    return library


def _check_layout(library: ctypes.CDLL) -> None:
    """Raise KernelUnavailable for a library built from other sources, which would read the structs wrongly."""
    expected = LAYOUT
    for structure in STRUCTS:
        expected = expected * 257 + ctypes.sizeof(structure)
    function = getattr(library, "triforce_layout", None)
    if function is not None:
        function.restype = c_int64
    if function is None or c_int64(expected).value != function():
        raise KernelUnavailable("not loaded: it was built from other sources; install triforce again")
