"""What the experts in host memory have done so far."""

from __future__ import annotations

from dataclasses import dataclass

from ..events import ExpertsRun


@dataclass(slots=True)
class ExpertStatistics:
    """Counts of the experts of `layers` layers in host memory.

    `passes` counts each layer of each pass, `experts` those that ran in them, `bytes` those that were read on the host
    or copied to the device, and `seconds` the host's time, 0 where the device runs them.
    """

    way: str
    layers: int = 0
    passes: int = 0
    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def event(self) -> ExpertsRun:
        """Return the statistics as an event."""
        return ExpertsRun(self.way, self.layers, self.passes, self.experts, self.bytes, self.seconds)
