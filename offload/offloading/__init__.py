"""Tiers of memory for the full KV cache: resident on the device, streamed over the link, attended to on the host."""

from .factory import Spread, TierSettings
from .host_memory import make_link
from .link import LinkStatistics, SimulatedLink, TransferFailed
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
