"""Build the native kernel where it is missing, before anything of the check needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_bare import is_missing
from gpu_rows import Rows

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "offload" / "kernels" / "native"
FLAGS = ("-std=gnu11", "-O2", "-pthread", "-fPIC", "-Wno-psabi")  # those of setup.py


def build_kernel(rows: Rows) -> dict:
    """Build the kernel if it cannot be loaded. Raises RuntimeError with the reason if it cannot be built."""
    if level := _level():
        rows.add("native kernel", level, "was built before")
        return {"level": level}
    reasons = []
    for way in (_by_setuptools, _by_compiler):
        reason = way()
        if not reason and (level := _level()):
            rows.add("native kernel", level, f"built{way.__name__.replace('_', ' ')}")
            return {"level": level}
        reasons.append(reason or "the library that it built cannot be loaded")
    raise RuntimeError(
        "the native kernel could not be built, host and hybrid rows are not measured: " + "; ".join(reasons)
    )


def _level() -> str:
    """Return the level of the kernel that can be loaded; empty if there is none."""
    from offload.kernels.native import KernelUnavailable, find_kernel

    try:
        return find_kernel().level
    except KernelUnavailable:
        return ""


def _by_setuptools() -> str:
    if is_missing("setuptools"):
        return "there is no setuptools"
    return _failure([sys.executable, str(ROOT / "setup.py"), "-q", "build_ext", "--inplace"])


def _by_compiler() -> str:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "there is no C compiler"
    target, made = FOLDER / "_kernel.abi3.so", FOLDER / f"build-{os.getpid()}.so"
    reason = _failure([compiler, *FLAGS, "-shared", str(FOLDER / "kernel.c"), "-lm", "-o", str(made)])
    if not reason:
        made.replace(target)  # a library that is open is not written to
    made.unlink(missing_ok=True)
    return reason


def _failure(command: list[str]) -> str:
    """Run a command; return the end of what it said if it failed."""
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]}: {error}"
    return "" if run.returncode == 0 else f"{Path(command[0]).name}: {run.stderr.strip()[-200:]}"
