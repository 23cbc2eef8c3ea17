"""Running attention to tokens as they are and to quantised groups, which Triton's kernels carry from part to part."""

from typing import Any

import torch
from torch import Tensor

from ..accumulate import Newest
from ..attention import Partial
from . import ROWS, ops


class GroupAccumulator:
    """Attention of rotated queries `[tokens, heads, head_dim]`, to which parts of the keys are added in any order.

    Of a pass of more than `ROWS` tokens, keys are not split among the GPU's processors: rows are enough work, and
    states would take too much memory. `state_bytes` (architecture/tier_footprint.py) counts them.
    """

    newest: Newest = "first"

    def __init__(self, q: Tensor, kv_heads: int, kind: str) -> None:
        self._q, self._kind = q, kind
        self._splits = ops.useful_splits(q.device, kv_heads) if len(q) <= ROWS else 1
        self._states = ops.new_state(q, self._splits + 1)  # the last one is the host's
        self._has_begun = self._has_host = False

    def attend_exact(
        self, rows: slice, keys: Tensor, values: Tensor, sink: tuple[Tensor, int] | None, tail: int, before: int
    ) -> None:
        """Begin rows with a sink and the newest keys, causally. All rows are begun so, or none.

        Args:
            keys, values: `[kv_heads, tokens, head_dim]`: those of the sink first, and the newest ones from `tail` on.
            sink: zeros `[kv_heads, 1]` in int32, and the tokens of the sink; None: no sink before them.
            before: newest keys before the queries' own.
        """
        q, state = self._q[rows], self._states[: self._splits, rows]
        if sink is not None:
            table, tokens = sink
            ops.attend_table(q, keys, values, state, table, tokens, tail, tokens + before + 1)
        else:
            ops.attend_pages(q, keys[:, tail:], values[:, tail:], state, before + 1, True, True)
        self._has_begun = True

    def attend_growing(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        """Begin all rows with the first keys of a store, causally; `seen`, in device memory, as of `ops`."""
        ops.attend_growing(self._q, keys, values, self._states[: self._splits], seen)
        self._has_begun = True

    def attend_groups(self, rows: slice, groups: Tensor, first: int, stop: int) -> None:
        """Add groups `first` to `stop` of quantised ones `[kv_heads, groups, bytes]`, of which every row sees all."""
        if first < stop:
            state = self._states[: self._splits, rows]
            is_fresh = not self._has_begun
            ops.attend_groups(self._q[rows], groups, state, self._kind, first, stop, is_fresh)
            self._has_begun = True

    def add(self, rows: slice, part: Any) -> None:
        raise NotImplementedError("other partial results come as a state")

    def add_state(self, state: Tensor) -> None:
        """Add what the host has summed, `[tokens, heads, 2 + head_dim]`; see `Accumulator.state`."""
        self._states[self._splits].copy_(state, non_blocking=True)
        self._has_host = True

    def output(self, lse: Tensor | None = None) -> Tensor:
        """Return the attention to all keys added, as q; `lse` `[tokens, heads]` in fp32 is filled, if given."""
        first = 0 if self._has_begun else self._splits
        return ops.finish(self._states[first : self._splits + self._has_host], self._q, lse)

    def partial(self) -> Partial:
        """Return the output with its log-sum-exp."""
        lse = torch.empty(self._q.shape[:2], dtype=torch.float32, device=self._q.device)
        return Partial(self.output(lse), lse)
