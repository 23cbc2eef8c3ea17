"""Settings of where keys, values and experts lie. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..units import MOST_BYTES
from .validation import require, require_between, require_one_of, require_types

SLOWEST_LINK = 0.0001  # GB/s of a simulated link: with a slower one, a single copy takes minutes
PLANES = "planes"
OFFLOADS = ("auto", "none", "stream", "host", "hybrid", PLANES)
STREAMED = ("stream", PLANES)  # where the host attends to nothing
EXPERTS = ("auto", "device", "host")
COPIED_ROWS = 32  # of the least pass that copies experts to the device, unless a plan has set it: as in llama.cpp


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the full KV cache and experts are, and what computes those in host memory. It does not change the text.

    `offload`: none keeps all KV on the device; stream copies the KV in host memory over the link; host attends to it on
    the CPU; hybrid does both at once; planes keeps 8 of 12 bits of packed KV on the device, from which is drafted, and
    streams the others; auto is the plan's choice. `memory` and `host_memory` are the bytes to use, None
    for all free memory. `resident_layers` keep their KV on the device, None for as many as fit. `host_share` is the
    fraction of the other layers' KV that the host attends to, None to balance host and device. `link_gb_s` simulates a
    link of so many 10^9 bytes per second to a device on the CPU, to try offloading without a GPU.

    `experts`: where the experts of a mixture lie: host keeps those that do not fit the device in host memory, runs them
    there in steps and copies them over the link for prompts; device keeps them with the other weights; auto is the
    plan's choice.

    `disk` is a folder: on a CPU, KV for which `host_memory` is too small lies in a file there, of at most `disk_limit`
    bytes (None: as much as is free), which has no name and is gone after the run.
    """

    offload: str = "auto"
    memory: int | None = None
    host_memory: int | None = None
    resident_layers: int | None = None
    host_share: float | None = None
    link_gb_s: float | None = None
    experts: str = "auto"
    disk: str | None = None
    disk_limit: int | None = None

    def __post_init__(self) -> None:
        require_types(self)
        require_one_of("offload", self.offload, OFFLOADS)
        for name, size in (("memory", self.memory), ("host-memory", self.host_memory), ("disk-limit", self.disk_limit)):
            require_between(name, size, 1, MOST_BYTES, "use a size such as 22GiB, or leave it out")
        share, link = self.host_share, self.link_gb_s
        require_between("resident-layers", self.resident_layers, 0, 10_000, "use 0 to 10,000, or leave it out")
        require_one_of("experts", self.experts, EXPERTS)
        require_between("host-share", share, 0, 1, "use a number from 0 to 1")
        require(
            share is None or self.offload in ("auto", "hybrid"),
            f"host-share goes with hybrid, and offload is {self.offload}",
            "use --offload hybrid, or leave host_share out",
        )
        require(
            link is None or SLOWEST_LINK <= link < math.inf,
            f"link is {link} GB/s",
            f"use a number from {SLOWEST_LINK}, such as 25",
        )
        require(self.disk != "", "the name of the folder on disk is empty", "name a folder on a disk, or leave it out")
