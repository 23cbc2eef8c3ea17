"""The GPUs of this machine, found without torch, which takes seconds to import."""

from __future__ import annotations

import shutil
import subprocess

PATIENCE_S = 5.0


def found_gpus() -> list[str]:
    """Their names as the driver reports them; none where its `nvidia-smi` is not there, or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
