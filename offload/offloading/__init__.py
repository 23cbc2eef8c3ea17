"""Tiers of memory for the full KV cache: resident on the device, streamed over the link, attended to on the host."""

from .disk_link import DiskFailed, DiskLink
from .expert_tier import ExpertMover, ExpertTier
from .factory import TieredStoreFactory, check_model
from .host_memory import make_link
from .link import LinkStatistics, SimulatedLink, TransferFailed
from .settings import TierSettings
from .weights import StreamedLayers, WeightTier

__all__ = [
    "DiskFailed",
    "DiskLink",
    "ExpertMover",
    "ExpertTier",
    "LinkStatistics",
    "SimulatedLink",
    "StreamedLayers",
    "TierSettings",
    "TieredStoreFactory",
    "TransferFailed",
    "WeightTier",
    "check_model",
    "make_link",
]
