"""Attention with fixed shapes and addresses over stored keys and values, for steps that are recorded in CUDA graphs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.rope import Rows, rotate, rows_of
from ..kernels import triton
from ..kernels.triton.accumulate import attend_growing
from ..kernels.triton.row_ops import append
from ..memory.plain_store import PlainStore


class StepInputs:
    """The inputs that steps over any cache share: where the rows are, and which keys they see."""

    def __init__(self, rows: int, capacity: int, like: Tensor) -> None:
        """Make inputs for `rows` rows over `capacity` keys, of the dtype, device and head_dim of `like`."""
        head_dim = like.shape[-1]
        self.angles = like.new_zeros((rows, 1, head_dim)), like.new_zeros((rows, 1, head_dim))
        self._counter = torch.zeros(rows + 1, dtype=torch.long, device=like.device)
        self.positions = self._counter[:-1]  # [rows], of the rows' own keys among all
        self.seen = self._counter[1:2]  # how many keys the first row sees; each further row sees one more
        self._visible: Tensor | None = None  # [rows, capacity], the same as a mask, where Triton does not attend
        if not triton.serves(like.new_empty((rows, 1, head_dim))):
            self._visible = torch.ones((rows, capacity), dtype=torch.bool, device=like.device)
            self._every = torch.arange(capacity, device=like.device)

    def load(self, position: int, angles: Rows) -> None:
        """Set the first row's position among the keys, and the rotations of the tokens."""
        for target, source in zip(self.angles, angles, strict=True):
            target[: len(source)] = source
        torch.arange(position, position + len(self._counter), out=self._counter)
        if self._visible is not None:
            torch.le(self._every, self.positions.unsqueeze(1), out=self._visible)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with rotated queries `[rows, heads, head_dim]` to the keys `[kv_heads, capacity, head_dim]` they see.

        Returns as `q`.
        """
        if self._visible is None:
            return attend_growing(q, keys, values, self.seen)
        rows, heads, head_dim = q.shape
        grouped = q.view(rows, len(keys), -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
        keys, values = (x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._visible)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


class StoreStep:
    """A step over a PlainStore, from its first key to the in-flight ones."""

    def __init__(
        self, cache: Any, store: PlainStore, rows: int, queries: Tensor | None = None, capacity: int | None = None
    ) -> None:
        """Make a step of `rows` rows; each layer leaves its rotated queries in the first rows of `queries`, if given.

        `cache` has begun a pass: its `position` is the index in the store of the first in-flight token, and `rows` are
        the rotations of all of them. `queries`: `[layers, at least rows, heads, head_dim]`. `capacity`: keys that are
        masked; None for the store's.
        """
        self._cache, self._store, self._queries = cache, store, queries
        self._inputs = StepInputs(rows, store.capacity if capacity is None else capacity, store.layer(0)[0])

    def load(self) -> None:
        self._inputs.load(self._cache.position, self._cache.rows)

    def load_ahead(self) -> None:
        inputs = self._inputs
        inputs.load(self._cache.free_position(len(inputs.positions)), inputs.angles)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = self._inputs
        keys, values = self._store.layer(layer)  # [kv_heads, capacity, head_dim]
        rows = rows_of(self._store.shape, layer, inputs.angles)
        if triton.serves_rows(q):
            q = append(q, k, v, rows, keys, values, inputs.positions)
        else:
            keys.index_copy_(1, inputs.positions, rotate(k, rows).transpose(0, 1))
            values.index_copy_(1, inputs.positions, v.transpose(0, 1))
            q = rotate(q, rows)
        if self._queries is not None:
            self._queries[layer, : len(q)] = q
        return self._attend(layer, q, keys, values)

    def _attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend in a layer with rotated queries to the keys `[kv_heads, capacity, head_dim]` that they see."""
        return self._inputs.attend(q, keys, values)
