"""Tiers of memory for the full KV cache: resident on the device, streamed over the link, attended to on the host."""

from .build import Spread, TierSettings
from .link import LinkStatistics, SimulatedLink, TransferFailed
from .memory import make_link
from .weights import StreamedLayers, WeightTier

__all__ = [
    "LinkStatistics",
    "SimulatedLink",
    "Spread",
    "StreamedLayers",
    "TierSettings",
    "TransferFailed",
    "WeightTier",
    "make_link",
]
