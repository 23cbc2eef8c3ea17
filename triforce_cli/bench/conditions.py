"""The conditions of a measurement: version, date and machine, and how far its times are to be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from ..run.processor import processor

if TYPE_CHECKING:
    import torch

LARGEST_SPREAD = 0.10  # of the runs of a method; above, it is flagged
LARGEST_LOAD = 0.25  # cores used by other processes; above, it is flagged


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


def mean_load(loads: Iterable[float | None]) -> float | None:
    """Return the mean of loads in cores; None where none was measured."""
    found = [load for load in loads if load is not None]
    return mean(found) if found else None


def spread(values: Sequence[float]) -> float | None:
    """Return the range of the values relative to their median; None for fewer than two."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None
