"""The StreamingLLM cache (arXiv 2309.17453): the first and the latest tokens, at positions inside the cache.

Its memory is constant. It drops the tokens in between, which is good enough to draft with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rope, Rows, rotate, rows_of
from ..kernels.window_attention import Limits, attend_limited
from ..memory.plain_store import attend_stored, attend_tree
from ..memory.store import first_moved
from ..memory.tree_attention import Tree, branches_of
from .in_flight import InFlightTokens
from .recurrent_states import States
from .static_step import StepInputs


class Span(NamedTuple):
    """What a pass attends to, in indices of the buffer: the first `sink` tokens, and those from `start` to `stop` - 1.

    The tokens in flight are stored from `first` on, those of the pass last.
    """

    sink: int
    start: int
    first: int
    stop: int

    @property
    def position(self) -> int:
        """Return how many tokens are attended to before those in flight: the position of their first one."""
        return self.sink + self.first - self.start


class StreamingCache(InFlightTokens):
    """Attends to the first `sink` tokens and to the `window` tokens before those in flight.

    Layers that attend to a window of the model's own see the same tokens. Keys are kept before RoPE. Every pass numbers
    the tokens that it attends to from 0 and rotates them there, so no position exceeds the cache. Some tokens before
    the window are kept for rollback; a longer `truncate` starts over.
    """

    has_static_steps = True

    def __init__(
        self,
        shape: ModelShape,
        rope: Rope,
        sink: int,
        window: int,
        inflight: int,
        dtype: torch.dtype,
        device: torch.device,
        sliding_rope: Rope | None = None,
        states: States | None = None,
    ) -> None:
        """Make an empty cache.

        `sliding_rope`: of layers that attend to a window of the model's own; `states`: of layers with linear attention.
        """
        self.states = states
        self.shape = shape.full_attention
        self._sliding_rope = sliding_rope
        self.sink, self.window, self._most = sink, window, inflight
        self._room = sink + 2 * window + 2 * inflight  # about half of it is for rollback
        self.rope = rope
        self._dropped = 0  # tokens between the sink and the oldest of the others
        self.span = Span(0, 0, 0, 0)
        kinds = (self.shape, *([shape.sliding_attention] if shape.sliding_layers else []))
        self.device = device
        self._kinds = [_KindOfLayers(kind, self._room, dtype, device) for kind in kinds]

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(kind.keys.nbytes + kind.values.nbytes for kind in self._kinds)

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        if tree is None:
            self.begin_padded(tokens, tokens)
            self._positions = self._rotations_of(lambda rope: rope.rows(0, self.span.position + tokens))
        else:
            self._begin_tree(tokens, tree)

    def begin_padded(self, tokens: int, rows: int) -> None:
        assert 0 < tokens <= rows <= self._most, f"{rows} tokens at once where {self._most} are the most"
        self._enter(tokens, None)
        self._set_span(tokens, rows)
        if self.states is not None:
            self.states.begin(self.length, tokens)

    def _begin_tree(self, tokens: int, tree: Tree) -> None:
        assert 0 < tokens <= len(tree) <= self._most, f"{len(tree)} tokens at once where {self._most} are the most"
        self._enter(tokens, tree)
        # Once a tree is begun, its tokens must not move.
        self._set_span(len(tree), len(tree) if self._held else self._most)
        position = self.span.position
        depths = tree.on(self.device).depths + position

        def rotations(rope: Rope) -> Rows:
            cos, sin = (
                torch.cat((x[:position], x.index_select(0, depths))) for x in rope.rows(0, position + tree.depth)
            )
            return cos, sin

        self._positions = self._rotations_of(rotations)

    def _rotations_of(self, rows: Callable[[Rope], Rows]) -> list[Rows]:
        """Return the rotations of a pass: of the layers that attend to all tokens, and of those with a window."""
        return [rows(rope) for rope in (self.rope, self._sliding_rope) if rope is not None]

    def _set_span(self, inflight: int, room: int) -> None:
        stored = self.length - self._dropped
        if stored + room > self._room:
            stored = self._evict()
        sink = min(self.sink, stored)
        self.span = Span(sink, max(stored - self.window, sink), stored, stored + inflight)

    def _evict(self) -> int:
        """Drop tokens behind the sink, except a window and some for rollback; return how many tokens are left."""
        stored = self.length - self._dropped
        kept = self.window + (self._room - self.sink - self.window) // 4
        source = slice(stored - kept, stored)
        for tensor in self._tensors():
            tensor[:, :, self.sink : self.sink + kept] = tensor[:, :, source].clone()
        self._dropped += source.start - self.sink
        return self.sink + kept

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        return self._attend(0, layer, q, k, v, lse)

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        return self._attend(1, layer, q, k, v, lse)

    def _attend(
        self, number: int, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None
    ) -> Tensor:
        """Attend in layer number `layer` of those of a kind: 0 for those that attend to all tokens, 1 to a window."""
        kind, rows = self._kinds[number], self._positions[number]
        sink, start, _, stop = self.span
        if k is not None and v is not None:
            new = slice(stop - len(k), stop)
            kind.keys[layer][:, new], kind.values[layer][:, new] = k.transpose(0, 1), v.transpose(0, 1)
        keys, values = kind.keys[layer], kind.values[layer]
        keys, values = (torch.cat((x[:, :sink], x[:, start:stop]), dim=1) for x in (keys, values))
        cos, sin = rows_of(kind.shape, layer, rows)
        keys = rotate(keys, (cos.squeeze(1), sin.squeeze(1)))
        q = rotate(q, (cos[-len(q) :], sin[-len(q) :]))
        if cap := kind.shape.spec(layer).soft_cap:
            branches = None if self.tree is None else branches_of(self.tree, q.device, self._held)
            return attend_limited(q, keys, values, Limits(cap=cap), branches, lse)
        if self.tree is None:
            return attend_stored(q, keys, values, lse)
        return attend_tree(q, keys, values, self.tree, lse)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys, not rotated, and values `[kv_heads, room, head_dim]` as views, to be written to.

        `index` counts the layers that attend to all tokens.
        """
        return self._kinds[0].keys[index], self._kinds[0].values[index]

    def _tensors(self) -> list[Tensor]:
        return [tensor for kind in self._kinds for tensor in (kind.keys, kind.values)]

    def fits(self, rows: int) -> bool:
        return rows <= self._most

    def step_key(self) -> None:
        return None

    def new_step(self, rows: int) -> StreamingStep:
        return StreamingStep(self, rows)

    def clear(self) -> None:
        for tensor in self._tensors():
            tensor.zero_()

    def _compact(self, keep: Sequence[int]) -> None:
        first, moved = self.span.first, first_moved(keep)
        for tensor in self._tensors() if moved < len(keep) else ():
            at = torch.tensor([first + index for index in keep[moved:]], device=tensor.device)
            tensor[:, :, first + moved : first + len(keep)] = tensor.index_select(2, at)

    def skip(self, length: int) -> None:
        """Continue at position `length`, at least the committed one, with the sink alone as if it had been run.

        Committed tokens behind the sink are dropped.
        """
        assert length >= self.length >= min(self.sink, length), f"cannot skip from {self.length} to {length}"
        if self.states is not None:
            self.states.skip(self.length, length)
        self._dropped = max(length - self.sink, 0)
        self.length = length
        self._leave()

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} committed tokens to {length}"
        self._leave()
        # Unless a full window is left, or nothing was dropped, queries would see fewer tokens than they should.
        if self._dropped and length < self._dropped + self.sink + self.window:
            length = self._dropped = 0
        if self.states is not None:
            if not self.states.covers(length):
                length = self._dropped = 0
            self.states.truncate(length)
        self.length = length
        return length


class _KindOfLayers:
    """Keys and values `[layers, kv_heads, room, head_dim]` of the layers of one kind."""

    def __init__(self, shape: ModelShape, room: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        size = (shape.layers, shape.kv_heads, room, shape.head_dim)
        self.keys, self.values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))


class StreamingStep:
    """A step over a StreamingCache: the keys that may be seen are gathered and rotated at fixed positions."""

    def __init__(self, cache: StreamingCache, rows: int) -> None:
        self._cache = cache
        most = cache.sink + cache.window + rows
        keys, _ = cache.layer(0)
        self._inputs = StepInputs(rows, most, keys)
        cos, sin = (x.squeeze(1).clone() for x in cache.rope.rows(0, most))
        self._angles = cos, sin  # [most, head_dim]
        self._every = torch.arange(most, device=keys.device)
        self._is_behind_sink = (self._every >= cache.sink).long()
        self._seen = torch.zeros_like(self._every)  # where in the buffer the keys are that may be seen
        self._stored = torch.zeros(rows, dtype=torch.long, device=keys.device)  # where the rows' own are

    def load(self) -> None:
        cache, span = self._cache, self._cache.span
        position = span.position
        self._inputs.load(position, cache.rope.rows(position, position + span.stop - span.first))
        torch.arange(span.first, span.first + len(self._stored), out=self._stored)
        torch.add(self._every, self._is_behind_sink, alpha=span.start - span.sink, out=self._seen)

    def load_ahead(self) -> None:
        self._cache.begin_padded(len(self._stored), len(self._stored))  # which is never committed
        self.load()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.layer(layer)
        keys.index_copy_(1, self._stored, k.transpose(0, 1))
        values.index_copy_(1, self._stored, v.transpose(0, 1))
        keys, values = (x.index_select(1, self._seen) for x in (keys, values))
        own, every = (rows_of(self._cache.shape, layer, rows) for rows in (self._inputs.angles, self._angles))
        return self._inputs.attend(rotate(q, own), rotate(keys, every), values)
