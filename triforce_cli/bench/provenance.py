"""What a benchmark's report says of the version, the date and the machine."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..run.machine import processor

if TYPE_CHECKING:
    import torch


def provenance(device: torch.device, engine: str) -> dict[str, Any]:
    """Return the version, the date and the machine, whose `engine` is described in text, for a report."""
    import torch

    return versioned() | {
        "machine": {
            "name": processor(device),
            "threads": torch.get_num_threads(),
            "engine": engine,
            "torch": torch.__version__,
        },
    }


def versioned() -> dict[str, str]:
    """Return the version and the date."""
    return {"triforce": version("triforce"), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
