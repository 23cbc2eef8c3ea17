"""Plain keys and values in one memory, attended to by torch's or Triton's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels import triton
from ..kernels.attention import attend, attend_causal, attend_masked, merge, received_attention
from ..kernels.triton import accumulate as by_triton
from ..kernels.triton import ops as triton_ops
from ..kernels.triton import row_ops
from ..kernels.window_attention import Limits, attend_limited
from .store import ALL, DeviceStore
from .tree_attention import Tree, branches_of


class PlainStore(DeviceStore):
    """Keys and values, each `[layers, kv_heads, capacity, head_dim]`, attended to by torch's kernels."""

    least_chunk = 1

    def __init__(
        self, shape: ModelShape, capacity: int, dtype: torch.dtype, device: torch.device, by_row: bool = False
    ) -> None:
        """Make an empty store; `by_row`: where scores are capped, a token's bits do not depend on the others'."""
        self.shape, self.capacity, self.dtype, self.device = shape, capacity, dtype, device
        self._by_row = by_row
        # Not zeroed: memory that is never used is never committed, so a short sequence costs little.
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        if triton.serves_rows(q) and q.shape[1]:
            return row_ops.append(q, k, v, rows, *self.layer(layer), start, stored)
        new = slice(start + stored, start + len(k))
        self._keys[layer][:, new] = rotate(k, rows)[stored:].transpose(0, 1)
        self._values[layer][:, new] = v[stored:].transpose(0, 1)
        return rotate(q, rows)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        end = start + (len(q) if tree is None else len(tree))
        keys, values = self._keys[layer][:, :end], self._values[layer][:, :end]
        if cap := self.shape.spec(layer).soft_cap:
            limits = Limits(cap=cap, by_row=self._by_row)
            branches = None if tree is None else branches_of(tree, q.device, len(tree) - len(q))
            return attend_limited(q, keys, values, limits, branches, lse)
        return attend_stored(q, keys, values, lse) if tree is None else attend_tree(q, keys, values, tree, lse)

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        end = start + len(q)
        observe_attention(q, self._keys[layer][:, :end], lse, received[:, :end])

    def read(self, start: int, end: int, layers: slice = ALL) -> tuple[Tensor, Tensor]:
        return self._keys[layers, :, start:end], self._values[layers, :, start:end]

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        at = slice(start, start + keys.shape[2])
        self._keys[:, :, at], self._values[:, :, at] = keys, values

    def put(self, rows: Tensor, chunks: Tensor, size: int, keys: Tensor, values: Tensor) -> None:
        for target, source in zip(self._chunks(size), (keys, values), strict=True):
            target[rows, chunks] = source

    def _chunks(self, size: int) -> tuple[Tensor, Tensor]:
        """View keys and values as `[layers * kv_heads, chunks, size, head_dim]`."""
        whole = self.capacity // size * size
        keys, values = (x[:, :, :whole].unflatten(2, (-1, size)).flatten(0, 1) for x in (self._keys, self._values))
        return keys, values

    def move(self, targets: Tensor, sources: Tensor) -> None:
        for x in (self._keys, self._values):
            x.index_copy_(2, targets, x.index_select(2, sources))

    def dump(self, start: int, end: int) -> Tensor:
        return torch.stack(self.read(start, end), 3).cpu()

    def load(self, start: int, kv: Tensor) -> None:
        self.write(start, *kv.unbind(3))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `[kv_heads, capacity, head_dim]` as views, to be written to."""
        return self._keys[index], self._values[index]

    def clear(self) -> None:
        """Set everything to zero."""
        self._keys.zero_()
        self._values.zero_()

    def new_device_store(self, capacity: int) -> PlainStore:
        return PlainStore(self.shape, capacity, self.dtype, self.device, self._by_row)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        keys, values = (x[rows, chunks] for x in self._chunks(size))
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        return self._keys[layer][:, start:end].unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32)


def attend_stored(q: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None) -> Tensor:
    """Attend to stored keys and values, the last of which are the in-flight tokens' own; causally to those.

    q `[tokens, heads, head_dim]`, keys and values `[kv_heads, at least tokens, head_dim]`, rotated; returns as q.
    `lse` `[tokens, heads]`, if given, is filled with the log-sum-exp.
    """
    if triton.serves(q):
        return by_triton.attend_stored(q, keys, values, lse)
    return attend_causal(q, keys, values).output(lse, q.dtype)


def observe_attention(q: Tensor, keys: Tensor, lse: Tensor, received: Tensor) -> None:
    """Add the weights of `attend_stored` over the same keys to `received` `[kv_heads, keys]`; `lse` is what it gave."""
    if triton.serves(q[:1]):
        triton_ops.observe(q, keys, lse, received)
    else:
        received += received_attention(q, keys, lse)


def attend_tree(q: Tensor, keys: Tensor, values: Tensor, tree: Tree, lse: Tensor | None = None) -> Tensor:
    """Attend to stored keys and values, the last of which are a tree's; the queries are those of its last tokens.

    Shapes as in `attend_stored`. The tokens before the tree are seen by all queries, and need no mask.
    """
    before = keys.shape[1] - len(tree)
    own = attend_masked(q, keys[:, before:], values[:, before:], tree.on(q.device).sees[-len(q) :])
    attend_all = by_triton.attend_keys if triton.serves(q) else attend
    part = merge([attend_all(q, keys[:, :before], values[:, :before]), own]) if before else own
    return part.output(lse, q.dtype)
