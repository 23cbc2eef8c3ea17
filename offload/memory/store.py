"""Stores: memory for a sequence's rotated keys and values, and attention over it.

A store addresses tokens by position. Its cache tracks which of them are committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import rotate
from ..kernels import triton
from ..kernels.attention import Partial, attend, attend_causal, attend_masked, merge, received_attention
from ..kernels.triton.accumulate import attend_keys as attend_keys_by_triton
from ..kernels.triton.accumulate import attend_stored as attend_stored_by_triton
from ..kernels.triton.accumulate import observe as observe_by_triton
from ..kernels.window_attention import Limits, attend_limited
from .tree_attention import Tree, branches_of

if TYPE_CHECKING:
    from ..kernels.native import Kernel


class Store(Protocol):
    """Rotated keys and values of up to `capacity` tokens of one sequence, for all layers."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    grain: int  # tokens that are always selected together
    kernel: Kernel | None = None  # the native kernel, where it attends to the store
    span: int = 0  # tokens per page, whose borders no chunk may cross; 0: no pages
    is_recordable = False  # whether passes are native kernel calls alone, over memory that stays where it is

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

    def end(self) -> None:
        """End the pass; its tokens are committed."""
        return

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy contiguous rows that a layer of the pass has computed, such as queries."""
        target.copy_(source)

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        return

    def restartable(self, length: int) -> int:
        """Return the largest length, up to `length`, to which the store can be truncated."""
        return length

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Store new tokens from position `start` on, and return their rotated queries.

        q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, rows as `rotate` takes them. A store in
        one memory takes a q of 0 heads, too. The queries are valid until the next call.
        """
        ...

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None) -> Tensor:
        """Attend causally to the stored tokens with the rotated queries of the tokens from position `start` on.

        With a `tree`, its tokens are stored from position `start` on, the queries are those of its last ones, and each
        attends to all tokens before the tree, to its ancestors and to itself.
        Returns `[tokens, heads, head_dim]`, valid until the next call.
        """
        ...

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move the tokens at `start + keep[i]` to `start + i`, for increasing `keep`; between passes."""
        moved = first_moved(keep)
        if moved < len(keep):
            at = torch.tensor([index - moved for index in keep[moved:]], device=self.device)
            both = self.read(start + moved, start + keep[-1] + 1)
            self.write(start + moved, *(x.index_select(2, at) for x in both))

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens, each `[layers, kv_heads, end - start, head_dim]`: views or copies."""
        ...

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, shaped as `read` returns them, from position `start` on."""
        ...

    def export(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as `read` does, as copies in host memory."""
        return tuple(x.to("cpu", copy=True, memory_format=torch.contiguous_format) for x in self.read(start, end))

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of the tokens' KV in host memory, `[layers, kv_heads, ...]` in the layout of its memory.

        With the native kernel, the layout is that of its blocks, and `start` and `end` are multiples of BLOCK.
        """
        return torch.stack(self.export(start, end), 3)

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` of a store for the same kernel returned, from position `start` on."""
        self.write(start, *kv.unbind(3))

    def put(self, rows: Tensor, chunks: Tensor, size: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values from `gather` in other chunks of the same rows."""
        ...

    def near(self, capacity: int) -> Store:
        """Return an empty store for the same model on the device, to `write` and `put` to."""
        ...

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks of `size` tokens: number `chunks[i]` of row `rows[i]`, which is layer * kv_heads + KV head.

        Returns keys and values, each `[len(rows), size, head_dim]`.
        """
        ...

    read_cost = 1.0  # estimated time to read a byte in a pass, relative to the device's memory
    mean_keys_cost = 14.0  # estimated time of `mean_keys` of all tokens, relative to attention to them

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """Return the mean keys of chunks between two positions, `[kv_heads, chunks, head_dim]` in fp32."""
        ...

    def keep_mean_keys(self, chunk: int) -> None:
        """Prepare for `mean_keys` of chunks of this size: where keys are slow to read, a prefill makes them in passing.

        Without effect on other stores.
        """
        return


class ObservableStore(Store, Protocol):
    """A store that can say how much attention each token has received, for caches that evict the others."""

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; fill `lse` `[tokens, heads]`, in fp32, with the log-sum-exp."""
        ...

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        """Add the softmax weights of `attend(layer, q, start)`, which returned `lse`, to `received`.

        `received` `[kv_heads, at least start + tokens]`, in fp32: for each stored token the sum over all queries of its
        KV head. Other calls may have followed that of `attend`, if the tokens are still there.
        """
        ...


class PlainStore(Store):
    """Keys and values, each `[layers, kv_heads, capacity, head_dim]`, attended to by torch's kernels."""

    grain = 1

    def __init__(
        self, shape: ModelShape, capacity: int, dtype: torch.dtype, device: torch.device, by_row: bool = False
    ) -> None:
        """Make an empty store; `by_row`: where scores are capped, a token's bits do not depend on the others'."""
        self.shape, self.capacity, self.dtype, self.device = shape, capacity, dtype, device
        self._by_row = by_row
        # Not zeroed: memory that is never used is never committed, so a short sequence costs little.
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        new = slice(start, start + len(q))
        self._keys[layer][:, new] = rotate(k, rows).transpose(0, 1)
        self._values[layer][:, new] = v.transpose(0, 1)
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

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._keys[:, :, start:end], self._values[:, :, start:end]

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        at = slice(start, start + keys.shape[2])
        self._keys[:, :, at], self._values[:, :, at] = keys, values

    def put(self, rows: Tensor, chunks: Tensor, size: int, keys: Tensor, values: Tensor) -> None:
        for target, source in ((self._keys, keys), (self._values, values)):
            whole = target.shape[2] // size * size
            target[:, :, :whole].unflatten(2, (-1, size)).flatten(0, 1)[rows, chunks] = source

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `[kv_heads, capacity, head_dim]` as views, to be written to."""
        return self._keys[index], self._values[index]

    def clear(self) -> None:
        """Set everything to zero."""
        self._keys.zero_()
        self._values.zero_()

    def near(self, capacity: int) -> PlainStore:
        return PlainStore(self.shape, capacity, self.dtype, self.device, self._by_row)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return gather_chunks(self._keys, self._values, rows, chunks, size)

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        return self._keys[layer][:, start:end].unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32)


def append(
    store: Store,
    layer: int,
    start: int,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rows: tuple[Tensor, Tensor],
    *stored: int,
) -> Tensor:
    """Return rotated queries as `Store.append`, which stores k and v; without them, nothing is stored."""
    return rotate(q, rows) if k is None else store.append(layer, start, q, k, v, rows, *stored)


def first_moved(keep: Sequence[int]) -> int:
    """Return the first index that `Store.compact` moves, or how many there are."""
    return next((at for at, index in enumerate(keep) if at != index), len(keep))


def gather_chunks(keys: Tensor, values: Tensor, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Copy chunks as in `Store.gather` from keys and values `[layers, kv_heads, tokens, head_dim]`."""
    whole = keys.shape[2] // size * size
    return tuple(x[:, :, :whole].unflatten(2, (-1, size)).flatten(0, 1)[rows, chunks] for x in (keys, values))


def attend_stored(q: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None) -> Tensor:
    """Attend to stored keys and values, the last of which are the in-flight tokens' own; causally to those.

    q `[tokens, heads, head_dim]`, keys and values `[kv_heads, at least tokens, head_dim]`, rotated; returns as q.
    `lse` `[tokens, heads]`, if given, is filled with the log-sum-exp.
    """
    if triton.serves(q):
        return attend_stored_by_triton(q, keys, values, lse)
    part = attend_causal(q, keys, values)
    if lse is not None:
        lse.copy_(part.lse)
    return part.out


def observe_attention(q: Tensor, keys: Tensor, lse: Tensor, received: Tensor) -> None:
    """Add the weights of `attend_stored` over the same keys to `received` `[kv_heads, keys]`; `lse` is what it gave."""
    if triton.serves(q[:1]):
        observe_by_triton(q, keys, lse, received)
    else:
        received += received_attention(q, keys, lse)


def given(lse: Tensor | None) -> dict[str, Tensor]:
    """Return the argument `lse` of an `attend` if there is one: not every store takes it."""
    return {} if lse is None else {"lse": lse}


def attend_tree(q: Tensor, keys: Tensor, values: Tensor, tree: Tree, lse: Tensor | None = None) -> Tensor:
    """Attend to stored keys and values, the last of which are a tree's; the queries are those of its last tokens.

    Shapes as in `attend_stored`. The tokens before the tree are seen by all queries, and need no mask.
    """
    before = keys.shape[1] - len(tree)
    own = attend_masked(q, keys[:, before:], values[:, before:], tree.on(q.device).sees[-len(q) :])
    part = merge([_attend_before(q, keys[:, :before], values[:, :before]), own]) if before else own
    if lse is not None:
        lse.copy_(part.lse)
    return part.out.to(q.dtype)


def _attend_before(q: Tensor, keys: Tensor, values: Tensor) -> Partial:
    """Attend with every query to every key."""
    return attend_keys_by_triton(q, keys, values) if triton.serves(q) else attend(q, keys, values)
