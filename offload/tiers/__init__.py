"""Tiers of memory for the full KV cache: resident on the device, streamed over the link, attended to on the host."""

from .build import Spread, TierSettings
from .link import LinkStatistics, SimulatedLink, TransferFailed

__all__ = ["LinkStatistics", "SimulatedLink", "Spread", "TierSettings", "TransferFailed"]
