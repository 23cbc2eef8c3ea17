"""A full cache's store of quantised keys and values on a GPU, attended to by Triton's kernels.

Which tokens are quantised, and which are attended to as they are, is as on a CPU (quantized_store.py), and so are the
numbers and the layout of their groups.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import GROUP, WINDOW
from ..kernels.attention import Partial, attend_masked, merge
from ..kernels.kv_groups import dequantize_groups, dequantize_keys, quantize_groups
from ..kernels.triton.accumulate import GroupAccumulator
from .plain_store import PlainStore
from .quantized_groups import GroupTiers
from .quantized_memory import QuantizedMemory, runs_of_windows
from .tree_attention import Tree

_QUANTIZED_AT_ONCE = 16  # groups, so that numbers in fp32 take little memory


class DeviceQuantizedStore(QuantizedMemory):
    """Quantised keys and values of all whole windows, and plain ones of the newest windows."""

    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        tiers: GroupTiers | None = None,
    ) -> None:
        self._slots: tuple[tuple[int, int, int], Tensor] | None = None  # of a tree's tokens, and what they depend on
        super().__init__(shape, capacity, dtype, device, kind, tiers)

    def new_device_store(self, capacity: int) -> PlainStore:
        return PlainStore(self.shape, capacity, self.dtype, self.device)

    def encode(self, layer: int, groups: range, at: int) -> None:
        for memory, some, part in self.groups.targets(layer, groups):
            for first in range(0, len(some), _QUANTIZED_AT_ONCE):
                inside = some[first : first + _QUANTIZED_AT_ONCE]
                begin = at + (part.start + first) * GROUP
                tokens = slice(begin, begin + len(inside) * GROUP)
                both = (x[:, tokens].unflatten(1, (-1, GROUP)) for x in self.ring.store.layer(layer))
                memory[:, inside.start : inside.stop] = quantize_groups(*both)

    def decode(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (x.flatten(1, 2) for x in dequantize_groups(groups, self.shape.head_dim, self.dtype))
        return keys, values

    def decode_keys(self, groups: Tensor) -> Tensor:
        return dequantize_keys(groups, self.shape.head_dim).flatten(1, 2)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        if tree is not None:
            return self._attend_tree(layer, q, start, tree, lse)
        if self.tiers is not None and layer >= self.resident_layers:
            return self._attend_tiers(self.tiers, layer, q, start, lse)
        runs = []
        for at, some in runs_of_windows(start, len(q)):
            result = GroupAccumulator(q[some], self.shape.kv_heads)
            rows = slice(0, some.stop - some.start)
            self._attend_exact(layer, result, rows, at)
            self._attend_groups(layer, result, rows, at // WINDOW * WINDOW // GROUP)
            runs.append(result.output(None if lse is None else lse[some]))
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def _attend_groups(self, layer: int, result: GroupAccumulator, rows: slice, stop: int) -> None:
        """Add groups up to number `stop` that are in the device's memory: over tiers those of open pages."""
        for first, groups in self.groups.on_device(layer, stop):
            result.attend_groups(rows, groups, min(stop - first, groups.shape[1]))

    def _attend_tiers(self, tiers: GroupTiers, layer: int, q: Tensor, start: int, lse: Tensor | None) -> Tensor:
        result = GroupAccumulator(q, self.shape.kv_heads)
        for _ in self._attend_whole(tiers, layer, q, result):
            for at, some in runs_of_windows(start, len(q)):
                self._attend_exact(layer, result, some, at)
            self._attend_open(layer, result, start, len(q))
        return result.output(lse)

    def _attend_open(self, layer: int, result: GroupAccumulator, start: int, tokens: int) -> None:
        """Add the groups of the pass's own pages: those of the windows before a token's own."""
        for number, groups in self.groups.on_device(layer, -(-(start + tokens) // GROUP)):
            base = number * GROUP
            low, high = (min(max(at, start), start + tokens) for at in (base, base + self.page_tokens))
            for at, some in runs_of_windows(low, high - low):
                rows = slice(some.start + low - start, some.stop + low - start)
                result.attend_groups(rows, groups, (at // WINDOW * WINDOW - base) // GROUP)
            if high < start + tokens:
                result.attend_groups(slice(high - start, tokens), groups, groups.shape[1])

    def _attend_whole(self, tiers: GroupTiers, layer: int, q: Tensor, result: GroupAccumulator) -> Iterator[None]:
        """Add the whole pages before the pass, of which every row sees all; yield when to add what is newer."""
        for whole in tiers.attend(layer - self.resident_layers, q, result):
            if whole is None:
                yield
            else:
                groups = tiers.format.parts(whole[1])
                result.attend_groups(slice(0, len(q)), groups, groups.shape[1])

    def _attend_exact(self, layer: int, result: GroupAccumulator, rows: slice, start: int) -> None:
        """Begin rows of one window, from position `start` on, with the tokens of the window that they see."""
        first = self.ring.place(start // WINDOW * WINDOW)
        keys, values = (x[:, first : first + WINDOW] for x in self.ring.store.layer(layer))
        result.attend_exact(rows, keys, values, start % WINDOW)

    def _attend_rounded(self, layer: int, q: Tensor, stop: int) -> Partial:
        """Attend to the first `stop` quantised groups alone, of which every row sees all."""
        result = GroupAccumulator(q, self.shape.kv_heads)
        tiers = self.tiers if layer >= self.resident_layers else None
        for _ in (None,) if tiers is None else self._attend_whole(tiers, layer, q, result):
            self._attend_groups(layer, result, slice(0, len(q)), stop)
        return result.partial()

    def _attend_tree(self, layer: int, q: Tensor, start: int, tree: Tree, lse: Tensor | None) -> Tensor:
        first = start // WINDOW * WINDOW
        assert tree.depth <= self.deepest_tree(start), "a tree across the end of a window"
        own = self._attend_masked(layer, q, start, tree)
        if first:
            own = merge([self._attend_rounded(layer, q, first // GROUP), own])
        return own.output(lse, q.dtype)

    def _attend_masked(self, layer: int, q: Tensor, start: int, tree: Tree) -> Partial:
        """Attend to the tokens of the window before a tree and to the tree, as they are."""
        key = start, len(tree), self.ring.size
        if self._slots is None or self._slots[0] != key:  # the same in all layers
            self._slots = key, self.ring.places(range(start - start % WINDOW, start + len(tree)))
        sees = tree.on(self.device).sees[-len(q) :]
        mask = torch.cat((sees.new_ones((len(q), start % WINDOW)), sees), dim=1)
        keys, values = (x[:, self._slots[1]] for x in self.ring.store.layer(layer))
        return attend_masked(q, keys, values, mask)
