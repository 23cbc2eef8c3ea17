"""Run the tests marked cuda under torch's sanitizer, with their output in a file as it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_bare import is_missing
from gpu_rows import Rows, Skipped

ROOT = Path(__file__).parents[1]
TIERS = ROOT / "tests" / "memory" / "test_cuda_tiers.py"
LINK = ROOT / "tests" / "memory" / "test_cuda_link.py"  # needs no GPU
SECONDS = 60  # of a test, where pytest-timeout is there


def run_tests(device: str, log: Path, rows: Rows, sanitize: bool = True, tiers_alone: bool = False) -> dict:
    """Run the tests marked cuda under torch's sanitizer or, without a GPU, the tests of the link that need none."""
    if is_missing("pytest"):
        raise Skipped("THERE IS NO PYTEST: no test marked cuda was run")
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in file.read_text("utf-8")]
    remark = "" if sanitize else "without the sanitizer"
    if tiers_alone:
        files, remark = [TIERS], f"only {TIERS.name}"
    elif absent := [name for name in ("platformdirs", "gguf", "xxhash") if is_missing(name)]:
        files, remark = [TIERS], f"only {TIERS.name}: missing {', '.join(absent)}"
    options = ["-v", "-p", "no:cacheprovider", "-m", "cuda", *map(str, files)]
    if device == "cpu":
        options = ["-v", "-p", "no:cacheprovider", "--noconftest", str(LINK)]
    if not is_missing("pytest_timeout"):
        options.append(f"--timeout={SECONDS}")
    sanitized = os.environ | ({"TORCH_CUDA_SANITIZER": "1"} if device == "cuda" and sanitize else {})
    with log.open("w") as output:
        command = [sys.executable, "-u", "-m", "pytest", *options]
        run = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=sanitized)
    lines = log.read_text("utf-8", "replace").strip().splitlines() or ["pytest said nothing"]
    if run.returncode:
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join([lines[-1], *failures]))
    rows.append(("marked cuda" if device == "cuda" else "without a GPU", lines[-1].strip("= "), remark))
    return {}
