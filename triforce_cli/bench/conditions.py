"""The conditions of a measurement: version, date and machine, and how far its times are to be trusted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import psutil

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


class OtherLoad:
    """Measures the cores that other processes use, from its construction on."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float:
        """Return the mean number of cores that other processes have used so far."""
        seconds, busy, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(busy - own, 0.0) / seconds if seconds > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Return the time, and the CPU seconds of all processes and of this one."""
        machine, process = psutil.cpu_times(), os.times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # On Linux the time of virtual machines' guests is in user and nice as well.
        counted_twice = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return time.monotonic(), sum(machine) - counted_twice - idle, process.user + process.system
