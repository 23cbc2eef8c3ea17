"""Stores: memory for a sequence's rotated keys and values, and attention over it.

A store addresses tokens by position. Its cache tracks which of them are committed.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels.native import Kernel
from .tree_attention import Tree

ALL = slice(None)


class Store(ABC):
    """Rotated keys and values of up to a number of tokens of one sequence, for all layers.

    Attributes:
        shape, dtype, device: of the model's layers that attend to all tokens.
        least_chunk: tokens of the smallest chunk: they can only be selected together.
        kernel: the native kernel, where it attends to the store.
        page_tokens: tokens per page, whose borders no chunk may cross; 0: no pages.
        read_cost: estimated time to read a byte in a pass, relative to the device's memory.
        mean_keys_cost: estimated time of `mean_keys` of all tokens, relative to attention to them.
    """

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    least_chunk: int
    kernel: Kernel | None = None
    page_tokens: int = 0
    read_cost: float = 1.0
    mean_keys_cost: float = 14.0

    @property
    def has_planes(self) -> bool:
        """Return whether plane A of packed keys and values is on the device, and B is not."""
        return False

    @property
    def resident_layers(self) -> int:
        """Return how many layers, the first ones, have all their KV on the device."""
        return self.shape.layers

    def prepare(self) -> Iterator[tuple[int, int]]:
        """Wait until the store is ready for its first pass, which would wait silently.

        Yields bytes of host memory that are pinned and bytes in all; nothing if no memory is being pinned.
        """
        return iter(())

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        """Begin a pass over tokens from position `start` on; each layer appends chunks of `chunk`, or all at once.

        The first `held` of a tree's tokens have been appended by earlier passes.
        """
        return

    def open_draft(self, start: int, end: int) -> None:
        """Have the pages of tokens between two positions on the device, behind committed ones, for `attend_plane`."""
        return

    def attend_plane(
        self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attend as `attend`, but to plane A alone of what is packed: a value is off by at most 2^-4 of itself."""
        return self.attend(layer, q, start, tree, lse)

    def end(self) -> None:
        """End the pass; its tokens are committed."""
        return

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        return

    def restartable(self, length: int) -> int:
        """Return the largest length, up to `length`, to which the store can be truncated."""
        return length

    def deepest_tree(self, start: int) -> int:
        """Return how deep a tree behind `start` tokens may be."""
        return sys.maxsize

    @abstractmethod
    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Store new tokens from position `start` on, and return their rotated queries.

        q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, rows as `rotate` takes them. A store in
        one memory takes a q of 0 heads, too. The queries are valid until the next call.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend causally to the stored tokens with the rotated queries of the tokens from position `start` on.

        With a `tree`, its tokens are stored from position `start` on, the queries are those of its last ones, and each
        attends to all tokens before the tree, to its ancestors and to itself. `lse` `[tokens, heads]` in fp32, if
        given, is filled with the log-sum-exp. Returns `[tokens, heads, head_dim]`, valid until the next call.
        """

    @abstractmethod
    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move the tokens at `start + keep[i]` to `start + i`, for increasing `keep`; between passes.

        After a tree, the tokens of the accepted path then stand in order behind the prefix.
        """

    @abstractmethod
    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, each `[layers, kv_heads, end - start, head_dim]`: views or copies."""

    @abstractmethod
    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of the tokens' KV in host memory, `[layers, kv_heads, ...]` in the layout of its memory.

        With the native kernel, the layout is that of its blocks, and `start` and `end` are multiples of BLOCK. Of
        quantised keys and values whole windows are copied.
        """

    @abstractmethod
    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` of a store for the same kernel returned, from position `start` on."""

    @abstractmethod
    def new_device_store(self, capacity: int) -> DeviceStore:
        """Return an empty store for the same model on the device."""

    @abstractmethod
    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks of `size` tokens: number `chunks[i]` of row `rows[i]`, which is layer * kv_heads + KV head.

        Returns keys and values, each `[len(rows), size, head_dim]`.
        """

    @abstractmethod
    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """Return the mean keys of chunks between two positions, `[kv_heads, chunks, head_dim]` in fp32."""

    def keep_mean_keys(self, chunk: int) -> None:
        """Prepare for `mean_keys` of chunks of this size: where keys are slow to read, a prefill makes them in passing.

        Without effect on other stores.
        """
        return


class DeviceStore(Store):
    """A store of keys and values as they are, in the device's memory: it can be written to, and observed."""

    @abstractmethod
    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        """Store tokens as in `Store`; of the first `stored`, already there, only queries are rotated."""

    @abstractmethod
    def read(self, start: int, end: int, layers: slice = ALL) -> tuple[Tensor, Tensor]:
        """Return keys and values as in `Store`, of some layers."""

    @abstractmethod
    def layer(self, index: int) -> Any:
        """Return a layer's memory: keys and values `[kv_heads, tokens, head_dim]`, or the native kernel's blocks."""

    @abstractmethod
    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy tokens of all layers between positions `[n]`, which may overlap."""

    def compact(self, start: int, keep: Sequence[int]) -> None:
        if moved := [(start + target, start + source) for target, source in enumerate(keep) if target != source]:
            self.move(*torch.tensor(moved, device=self.device).unbind(1))

    @abstractmethod
    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        """Add the softmax weights of `attend(layer, q, start)`, which gave `lse`, to `received`.

        `received` `[kv_heads, at least start + tokens]`, in fp32: for each stored token the sum over all queries of its
        KV head. Other calls may have followed that of `attend`, if the tokens are still there.
        """

    @abstractmethod
    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, shaped as `read` returns them, from position `start` on."""

    @abstractmethod
    def put(self, rows: Tensor, chunks: Tensor, size: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values from `gather` in other chunks of the same rows."""


def append(
    store: Any, layer: int, start: int, q: Tensor, k: Tensor | None, v: Tensor | None, rows: Rows, *stored: int
) -> Tensor:
    """Return rotated queries as `Store.append`, which stores k and v; without them, nothing is stored."""
    return rotate(q, rows) if k is None else store.append(layer, start, q, k, v, rows, *stored)


def first_moved(keep: Sequence[int]) -> int:
    """Return the first index that `Store.compact` moves, or how many there are."""
    return next((at for at, index in enumerate(keep) if at != index), len(keep))
