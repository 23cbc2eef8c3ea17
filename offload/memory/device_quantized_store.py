"""A full cache's store of quantised keys and values on a GPU, attended to by Triton's kernels.

Which tokens are quantised, and which are attended to as they are, is as on a CPU (quantized_store.py), and so are the
numbers and the layout of their groups.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import GROUP, SINK, WINDOW
from ..kernels.attention import Partial, attend, attend_masked, merge
from ..kernels.kv_groups import dequantize_groups, dequantize_keys, quantize_groups
from ..kernels.triton.accumulate import GroupAccumulator
from .plain_store import PlainStore, observe_attention
from .quantized_groups import GroupTiers
from .quantized_memory import QuantizedMemory
from .quantized_store import runs_of_windows
from .tree_attention import Tree

_QUANTIZED_AT_ONCE = 16  # groups, so that numbers in fp32 take little memory


class DeviceQuantizedStore(QuantizedMemory):
    """Quantised keys and values of all whole windows, and plain ones of the sink and of the newest windows."""

    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        tiers: GroupTiers | None = None,
    ) -> None:
        self._sink_table = torch.zeros((shape.kv_heads, 1), dtype=torch.int32, device=device)
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
        for at, some in runs_of_one_kind(start, len(q)):
            result = GroupAccumulator(q[some], self.shape.kv_heads)
            rows = slice(0, some.stop - some.start)
            self._attend_exact(layer, result, rows, at)
            self._attend_groups(layer, result, rows, at // WINDOW * WINDOW // GROUP)
            runs.append(result.output(None if lse is None else lse[some]))
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        for at, some in runs_of_windows(start, len(q)):
            window, end = at // WINDOW * WINDOW, start + some.stop
            keys, _ = self.read_layers(range(layer, layer + 1), 0, end, window)
            observe_attention(q[some], keys[0], lse[some], received[:, :end])

    def _attend_groups(self, layer: int, result: GroupAccumulator, rows: slice, stop: int) -> None:
        """Add groups up to number `stop` that are in the device's memory: over tiers those of open pages."""
        for first, groups in self.groups.on_device(layer, stop):
            result.attend_groups(rows, groups, _sink_groups(first), min(stop - first, groups.shape[1]))

    def _attend_tiers(self, tiers: GroupTiers, layer: int, q: Tensor, start: int, lse: Tensor | None) -> Tensor:
        result = GroupAccumulator(q, self.shape.kv_heads)

        for _ in self._attend_whole(tiers, layer, q, result):
            for at, some in runs_of_one_kind(start, len(q)):
                self._attend_exact(layer, result, some, at)
            self._attend_open(layer, result, start, len(q))
        return result.output(lse)

    def _attend_open(self, layer: int, result: GroupAccumulator, start: int, tokens: int) -> None:
        """Add the groups of the pass's own pages: those of the windows before a token's own."""
        for number, groups in self.groups.on_device(layer, -(-(start + tokens) // GROUP)):
            base, first = number * GROUP, _sink_groups(number)
            low, high = (min(max(at, start), start + tokens) for at in (base, base + self.page_tokens))
            for at, some in runs_of_windows(low, high - low):
                rows = slice(some.start + low - start, some.stop + low - start)
                result.attend_groups(rows, groups, first, (at // WINDOW * WINDOW - base) // GROUP)
            if high < start + tokens:
                result.attend_groups(slice(high - start, tokens), groups, first, groups.shape[1])

    def _attend_whole(self, tiers: GroupTiers, layer: int, q: Tensor, result: GroupAccumulator) -> Iterator[None]:
        """Add the whole pages before the pass, of which every row sees all; yield when to add what is newer."""
        for whole in tiers.attend(layer - self.resident_layers, q, result):
            if whole is None:
                yield
            else:
                groups = tiers.format.parts(whole[1])
                result.attend_groups(slice(0, len(q)), groups, _sink_groups(whole[0]), groups.shape[1])

    def _attend_exact(self, layer: int, result: GroupAccumulator, rows: slice, start: int) -> None:
        """Begin rows of one window, from position `start` on, with the tokens that they see as they are."""
        begin = 0 if start < SINK else max(start // WINDOW * WINDOW, SINK)
        sink = (self._sink_table, SINK) if begin else None
        tail = self.ring.place(begin)
        keys, values = self.ring.store.layer(layer)
        result.attend_exact(rows, keys, values, sink, tail, start - begin)

    def _attend_rounded(self, layer: int, q: Tensor, stop: int) -> Partial:
        """Attend to quantised groups 1 to `stop` alone, of which every row sees all."""
        result = GroupAccumulator(q, self.shape.kv_heads)
        tiers = self.tiers if layer >= self.resident_layers else None
        for _ in (None,) if tiers is None else self._attend_whole(tiers, layer, q, result):
            self._attend_groups(layer, result, slice(0, len(q)), stop)
        return result.partial()

    def _attend_tree(self, layer: int, q: Tensor, start: int, tree: Tree, lse: Tensor | None) -> Tensor:
        """Attend to a tree. Tokens behind the end of the window see it quantised, each as its path has it."""
        first = start // WINDOW * WINDOW
        before = [*range(min(start, SINK)), *range(max(first, SINK), start)]
        own = self._attend_masked(layer, q, start, before, tree)
        for row, token in enumerate(range(len(tree) - len(q), len(tree))):
            if start + tree.depths[token] >= first + WINDOW:
                part = self._attend_path(layer, q[row : row + 1], start, tree.path_to(token))
                own.out[row], own.lse[row] = part.out[0], part.lse[0]
        if first > SINK:
            own = merge([self._attend_rounded(layer, q, first // GROUP), own])
        return own.output(lse, q.dtype)

    def _attend_masked(self, layer: int, q: Tensor, start: int, before: list[int], tree: Tree) -> Partial:
        """Attend to tokens before a tree and to the tree, as they are."""
        key = start, len(tree), self.ring.size
        if self._slots is None or self._slots[0] != key:  # the same in all layers
            self._slots = key, self.ring.slots_of([*before, *range(start, start + len(tree))])
        sees = tree.on(self.device).sees[-len(q) :]
        mask = torch.cat((sees.new_ones((len(q), len(before))), sees), dim=1)
        keys, values = (x[:, self._slots[1]] for x in self.ring.store.layer(layer))
        return attend_masked(q, keys, values, mask)

    def _attend_path(self, layer: int, q: Tensor, start: int, path: list[int]) -> Partial:
        """Attend with one query to a path from `start` on, across the end of the window, to the window and the sink."""
        first = max(start // WINDOW * WINDOW, SINK)
        border = start // WINDOW * WINDOW + WINDOW
        tokens = [*range(first, start), *(start + token for token in path)]
        slots = self.ring.slots_of([*range(SINK), *tokens])
        keys, values = (x[:, slots] for x in self.ring.store.layer(layer))
        window = slice(SINK, SINK + border - first)
        both = [x[:, window].unflatten(1, (-1, GROUP)) for x in (keys, values)]
        keys[:, window], values[:, window] = self.decode(quantize_groups(*both))
        return attend(q, keys, values)


def runs_of_one_kind(start: int, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield tokens by their windows, as `runs_of_windows` does, those of the sink apart."""
    of_sink = min(max(SINK - start, 0), tokens)
    if of_sink:
        yield start, slice(0, of_sink)
    for at, some in runs_of_windows(start + of_sink, tokens - of_sink):
        yield at, slice(some.start + of_sink, some.stop + of_sink)


def _sink_groups(first: int) -> int:
    """Return how many of the groups from number `first` on, of a page, are the sink's: attended to as they are."""
    return SINK // GROUP if first == 0 else 0
