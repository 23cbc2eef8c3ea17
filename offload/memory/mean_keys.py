"""Mean keys of offloaded layers in host memory, made while a prefill has the keys on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .host_memory import allocator
from .tiers import Tiers


class HostMeanKeys:
    """Mean keys of chunks of `chunk` tokens; without them, a first selection would stream every key.

    Takes `host_mean_key_bytes` (architecture/tier_footprint.py) of pinned memory. They are valid up to a position:
    `commit` raises it, `truncate` lowers it.
    """

    def __init__(self, tiers: Tiers[Any], kv_heads: int, head_dim: int, chunk: int) -> None:
        self.chunk = chunk
        self._tiers = tiers
        layers, pages = tiers.pages.shape[:2]
        room = pages * tiers.format.tokens // chunk
        # Chunks come before heads, so that those of a run of tokens are one copy.
        self._means = allocator(tiers.device)((layers, room, kv_heads, head_dim), tiers.open.dtype)
        self._valid = 0  # chunks
        self._tickets: list[Any] = []  # of copies that may not have ended

    def store(self, layer: int, keys: Tensor) -> None:
        """Begin to copy the mean keys of an offloaded layer to the host, from its keys `[kv_heads, tokens, head_dim]`.

        They count from `commit` on.
        """
        link, count = self._tiers.link, keys.shape[1] // self.chunk
        means = torch.empty((count, *self._means.shape[2:]), dtype=keys.dtype, device=keys.device)
        for head, each in enumerate(keys):  # at once, means in fp32 would take as much memory again
            means[:, head] = each[: count * self.chunk].unflatten(0, (-1, self.chunk)).mean(1, dtype=torch.float32)
        self._tickets.append(link.copy([(self._means[layer, :count], means)], link.mark()))

    def pending(self) -> list[Any]:
        """Return the link's tickets since the last call, to wait for or, after an aborted pass, to forget."""
        tickets, self._tickets = self._tickets, []
        return tickets

    def commit(self, tokens: int) -> None:
        """Note that all layers have stored the mean keys of the first `tokens` tokens."""
        self._valid = tokens // self.chunk

    def truncate(self, length: int) -> None:
        """Note that the tokens from position `length` on may change."""
        self._valid = min(self._valid, length // self.chunk)

    def read(self, layer: int, start: int, end: int) -> Tensor:
        """Return the valid mean keys between two positions, `[chunks, kv_heads, head_dim]` in host memory."""
        return self._means[layer, start // self.chunk : min(end // self.chunk, self._valid)]
