"""Tiers of memory for the full KV cache: resident on the device, streamed over the link, attended to on the host."""

from .factory import TieredStoreFactory, TierSettings
from .host_memory import make_link
from .link import LinkStatistics, SimulatedLink, TransferFailed
from .weights import StreamedLayers, WeightTier

__all__ = [
    "LinkStatistics",
    "SimulatedLink",
    "StreamedLayers",
    "TierSettings",
    "TieredStoreFactory",
    "TransferFailed",
    "WeightTier",
    "make_link",
]
