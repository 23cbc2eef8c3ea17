"""The retrieval cache on any device: the selected chunks are copied to memory on the device."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.pages import GATHERED_BYTES
from ..memory.plain_store import PlainStore
from ..memory.store import append
from ..memory.tree_attention import Tree
from ..settings.method_sizes import PADDING
from .selected import SelectedCache
from .static_step import StoreStep


class CopiedCache(SelectedCache):
    """Copies of the selected chunks in the slots of a separate store, and the tail behind them.

    Attention does not depend on the order of rotated keys, so a chunk stays in its slot as long as it is selected, and
    a new selection copies only its new chunks.

    A row of `selection` is in the order of the slots, with -1 for an empty or outdated one. Tokens of the tail before
    position `exact_end` are copies of the full cache's.
    """

    exact_end = 0

    def _allocate(self) -> None:
        self.store = self._new_store()
        assert self.chunk % self.store.least_chunk == 0, "a slot is a multiple of the store's least chunk"

    def _new_store(self) -> Any:
        """Return an empty store for the selected chunks, and for the tail behind them."""
        return self._full.store.new_device_store(self._slots * self.chunk + self._room + PADDING)

    @property
    def has_static_steps(self) -> bool:
        return isinstance(self.store, PlainStore) and self.windows is None and not self.store.shape.caps_scores

    def fits(self, rows: int) -> bool:
        return True  # behind the tail there are PADDING positions

    def begin_padded(self, tokens: int, rows: int) -> None:
        self.begin(tokens)

    def step_key(self) -> Hashable:
        return None

    def new_step(self, rows: int) -> StoreStep:
        return StoreStep(self, self.store, rows)

    def free_position(self, rows: int) -> int:
        """Return where in the store `rows` tokens lie that are never kept: before a selection the tail is empty."""
        return self.store.capacity - rows

    def clear(self) -> None:
        self.store.clear()

    @property
    def position(self) -> int:
        """Return the index in `store` of the first in-flight token; `rows` are the rotations of all of them."""
        return self.position_of(self.length)

    def position_of(self, token: int) -> int:
        """Return the index in the store of a token of the tail."""
        return self.selection.shape[1] * self.chunk + token - self.tail_start

    def _invalidate(self, unchanged: int) -> bool:
        self.exact_end = min(self.exact_end, unchanged)
        if unchanged < self.tail_start:
            changed = self.selection >= unchanged // self.chunk
            self.selection = self.selection.masked_fill(changed, -1)  # the tokens of these slots have changed
        return True

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        start, end = max(self.exact_end, self.tail_start), min(self._full.length, self.length)
        if start < end:
            self.store.write(self.position_of(start), *self._full.store.read(start, end))
            self.exact_end = end

    def _use(self, chosen: Tensor, chunks: int) -> None:
        extra = chosen.shape[1] - self.selection.shape[1]
        if extra:
            padded = torch.nn.functional.pad(self.selection, (0, max(extra, 0)), value=-1)
            self.selection = padded[:, : chosen.shape[1]]
        self._replace(chosen, chunks)
        self.exact_end = chunks * self.chunk

    def _replace(self, wanted: Tensor, chunks: int) -> None:
        """Copy newly wanted chunks into the slots of chunks that are no longer wanted, equally many in each row."""
        is_wanted, is_there = (
            torch.zeros((len(wanted), chunks + 1), dtype=torch.bool, device=wanted.device) for _ in range(2)
        )
        is_wanted.scatter_(1, wanted, True)
        is_wanted[:, chunks] = False
        empty = (self.selection < 0) | (self.selection >= chunks)
        there = self.selection.masked_fill(empty, chunks)  # the last column means an empty slot
        is_there.scatter_(1, there, True)
        row, slot = (~is_wanted.gather(1, there)).nonzero(as_tuple=True)
        same_row, column = (~is_there.gather(1, wanted)).nonzero(as_tuple=True)
        assert torch.equal(row, same_row), "each row has as many new chunks as free slots"
        chunk = wanted[row, column]
        self.selection = self.selection.clone()
        self.selection[row, slot] = -1  # an interrupt must not leave a slot with a wrong chunk number
        for part in self._parts(len(row)):
            self._put(
                row[part], slot[part], *self._full.store.gather(row[part], chunk[part], self.chunk)
            )  # without a name for the copies, which would outlive the next ones' allocation
        self.selection[row, slot] = chunk

    def _put(self, rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store gathered chunks in slots."""
        self.store.put(rows, slots, self.chunk, keys, values)

    def _parts(self, chunks: int) -> Iterator[slice]:
        """Yield parts of so many chunks, so that the copy in between does not grow with the budget."""
        each = 2 * self.chunk * self.store.shape.head_dim * self.store.dtype.itemsize
        most = max(GATHERED_BYTES // each, 1)
        return (slice(start, start + most) for start in range(0, chunks, most))

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        position = self.position
        q = append(self.store, layer, position + self._held, q, k, v, self.rows_of(layer))
        return self.store.attend(layer, q, position, self.tree, lse)

    def _compact(self, keep: Sequence[int]) -> None:
        self.store.compact(self.position, keep)

    def truncate(self, length: int) -> int:
        super().truncate(length)
        self.exact_end = min(self.exact_end, length)
        return length
