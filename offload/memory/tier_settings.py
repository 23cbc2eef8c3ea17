"""How the KV cache is spread over tiers of memory: the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..architecture.pages import COPY_BYTES, LEAST_PAGE, RING_BUFFERS, copied_pages, disk_buffers
from ..settings.placement_settings import COPIED_ROWS, EXPERTS, PLANES, STREAMED
from ..settings.validation import require, require_types
from ..short_repr import short_repr

HOST_SHARES = {"stream": 0.0, "host": 1.0, "hybrid": None, PLANES: 0.0}


@dataclass(frozen=True)
class TierSettings:
    """Set how the KV cache is spread over tiers of memory.

    Args:
        mode: stream, host or hybrid; planes: plane A of packed pages is on the device, and B is streamed.
        resident_layers: layers whose KV stays on the device.
        share: the host's fraction of the pages; None balances it against the link.
        page_tokens: tokens per page, a multiple of `page_unit`; None derives it from the model's dimensions.
        buffers: buffers on the device for prefetching, 2 or more; with pages on disk their number follows.
        copy_bytes: consecutive pages are copied to the device together, up to about so many bytes.
        by_layers: prefill layer by layer, so that no page is read back.
        weight_layers: layers whose weights stay on the device; None for all.
        experts: host: experts may be in host memory; device: they are with other weights.
        expert_layers: layers whose experts stay on the device nevertheless.
        expert_rows: passes of so many rows or more copy experts to the device, and the host runs those of others.
        link_gb_s: simulate a link of this rate in 10^9 bytes/s, for a device that has none.
        disk: a folder; pages of layers that are not resident lie in a file there instead of host memory. They are
            streamed.
        host_layers: of these layers, those whose pages are in host memory nevertheless.

    Raises SettingsError for values and combinations that cannot be.
    """

    page_unit: ClassVar[int] = LEAST_PAGE  # with other pages attention sums in another order, and the bits change
    mode: str = "stream"
    resident_layers: int = 0
    share: float | None = None
    page_tokens: int | None = None
    buffers: int = RING_BUFFERS
    copy_bytes: int = COPY_BYTES
    by_layers: bool = True
    weight_layers: int | None = None
    experts: str = "device"
    expert_layers: int = 0
    expert_rows: int = COPIED_ROWS
    link_gb_s: float | None = None
    disk: Path | None = None
    host_layers: int = 0

    def __post_init__(self) -> None:
        require_types(self)
        require(self.mode in HOST_SHARES, f"mode is {short_repr(self.mode)}", f"use one of: {', '.join(HOST_SHARES)}")
        page, unit, share = self.page_tokens, self.page_unit, self.share
        require(
            page is None or (page >= unit and page % unit == 0),
            f"page_tokens is {short_repr(page)}",
            f"use a multiple of {unit:,}, or leave it out: other pages change the output's bits",
        )
        require(self.copy_bytes >= 1, f"copy_bytes is {short_repr(self.copy_bytes)}", "use 1 or more")
        require(self.buffers >= 2, f"buffers is {short_repr(self.buffers)}", "use 2 or more: one is read, one filled")
        require(
            self.disk is None or self.mode == "stream",
            f"pages on disk are streamed, and mode is {self.mode}",
            "use stream, or leave disk out",
        )
        require(share is None or 0 <= share <= 1, f"share is {short_repr(share)}", "use a number from 0 to 1")
        require(
            not share or self.mode not in STREAMED,
            f"share is {share}, and mode is {self.mode}",
            "use hybrid, or leave share out",
        )
        ways = EXPERTS[1:]  # auto is a plan's
        require(self.experts in ways, f"experts is {short_repr(self.experts)}", f"use one of: {', '.join(ways)}")
        for name in ("resident_layers", "weight_layers", "expert_layers", "host_layers"):
            layers = getattr(self, name)
            require(layers is None or layers >= 0, f"{name} is {short_repr(layers)}", "use 0 or more")
        require(self.expert_rows >= 1, f"expert_rows is {short_repr(self.expert_rows)}", "use 1 or more")
        rate = self.link_gb_s
        require(rate is None or 0 < rate < math.inf, f"link_gb_s is {short_repr(rate)}", "use a number above 0")

    def buffers_for(self, page_bytes: int, pages: int) -> tuple[int, int]:
        """Return how many buffers there are for a layer's `pages` of so many bytes, and how many pages one has."""
        if self.disk is not None:
            return disk_buffers(page_bytes), 1
        return self.buffers, copied_pages(page_bytes, pages, self.copy_bytes)
