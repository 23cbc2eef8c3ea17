"""A full cache's store of quantised keys and values on a GPU, attended to by Triton's kernels.

Which tokens are quantised, and which are attended to as they are, is as on a CPU (quantized_store.py), and so are the
numbers and the layout of their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW
from ..architecture.rope import rotate
from ..kernels.attention import Partial, attend, attend_masked, merge
from ..kernels.kv_groups import dequantize_groups, dequantize_keys, quantize_groups
from ..kernels.triton.group_accumulator import GroupAccumulator
from .plain_store import PlainStore, observe_attention
from .quantized_groups import GroupMemory, GroupTiers
from .quantized_memory import SINK_BLOCKS, QuantizedMemory, Ring
from .quantized_store import runs_of_windows
from .tree_attention import Tree

# So that numbers in fp32 take little memory:
_QUANTIZED_AT_ONCE = 16  # groups
_DEQUANTIZED_AT_ONCE = 32 * 2**20  # bytes of keys in fp32


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
        self._places: tuple[tuple[int, int, int], Tensor] | None = None  # of a tree's tokens, and what they depend on
        super().__init__(shape, capacity, dtype, device, kind, tiers)

    def _new_ring(self, size: int, slots: int) -> Ring:
        shape = self.shape
        memory = (shape.layers, shape.kv_heads, 2, slots, BLOCK * shape.head_dim)
        return Ring(size, torch.empty(memory, dtype=self.dtype, device=self.device))

    def _plain(self) -> Tensor:
        """View the ring's memory as `[layers, kv_heads, 2, tokens, head_dim]`: keys, and values."""
        return self._ring.blocks.view(*self._ring.blocks.shape[:3], -1, self.shape.head_dim)

    def _plain_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._plain()[layer].unbind(1)
        return keys, values

    def _put(
        self,
        layer: int,
        at: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor],
        rotated: Tensor,
        stored: int,
    ) -> None:
        keys, values = self._plain_layer(layer)
        new = slice(at + stored, at + len(k))
        keys[:, new] = rotate(k[stored:], tuple(row[stored:] for row in rows)).transpose(0, 1)
        values[:, new] = v[stored:].transpose(0, 1)
        rotated.copy_(rotate(q, rows))

    def _quantize_groups(self, layer: int, groups: range, slots: list[int]) -> None:
        for some, quantized in self._quantized(layer, groups, slots):
            for memory, inside, part in self.groups.runs(layer, some, to_write=True):
                memory[:, inside.start : inside.stop] = quantized[:, part]

    def _quantized(self, layer: int, groups: range, slots: list[int]) -> Iterator[tuple[range, Tensor]]:
        """Yield groups of a layer, whose blocks begin at these slots, quantised `[kv_heads, n, bytes]`."""
        both = self._plain_layer(layer)
        for some, slot in _runs_of_groups(groups, slots):
            tokens = slice(slot * BLOCK, slot * BLOCK + len(some) * GROUP)
            yield some, quantize_groups(*(x[:, tokens].unflatten(1, (-1, GROUP)) for x in both), self.kind)

    def _groups_of(self, layer: int, groups: range) -> Tensor:
        """Return quantised groups of a layer, `[kv_heads, n, bytes]` on the device."""
        runs = [memory[:, some.start : some.stop] for memory, some, _ in self.groups.runs(layer, groups)]
        return torch.cat(runs, dim=1) if len(runs) > 1 else runs[0]

    def _dequantized(self, layer: int, groups: range) -> tuple[Tensor, Tensor]:
        return self._dequantize(self._groups_of(layer, groups))

    def _dequantize(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[n, tokens, head_dim]` of groups `[n, groups, bytes]`."""
        keys, values = (x.flatten(1, 2) for x in dequantize_groups(groups, self.shape.head_dim, self.kind, self.dtype))
        return keys, values

    def _move(self, targets: Tensor, sources: Tensor) -> None:
        plain = self._plain()
        plain[:, :, :, targets] = plain[:, :, :, sources]

    def _read_slots(self, layer: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        keys, values = self._plain_layer(layer)
        runs = [slice(slot * BLOCK, (slot + count) * BLOCK) for slot, count in _consecutive(slots)] or [slice(0, 0)]
        return torch.cat([keys[:, run] for run in runs], dim=1), torch.cat([values[:, run] for run in runs], dim=1)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies as in `Store`: tokens of the ring as they are, in few operations, others as in the base."""
        if start < max(self._oldest, SINK):
            return super().read(start, end)
        runs = [slice(at, at + some.stop - some.start) for at, some in self._runs(start, end - start)]
        keys, values = torch.cat([self._plain()[:, :, :, run] for run in runs], dim=3).unbind(2)
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        """Return mean keys as in `Store`, of whole groups, in pieces of which few numbers in fp32 are in memory."""
        first = min(max(start, -(-SINK // chunk) * chunk), end)
        last = max(end // WINDOW * WINDOW // chunk * chunk, first)
        size = max(_DEQUANTIZED_AT_ONCE // (4 * self.shape.kv_heads * self.shape.head_dim) // chunk, 1) * chunk
        parts = [self._read(layer, start, first)[0]] if start < first else []
        for at in range(first, last, size):
            parts.append(self._dequantized_keys(layer, range(at // GROUP, min(at + size, last) // GROUP)))
        parts += [self._read(layer, last, end)[0]] if last < end else []
        return torch.cat([x.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32) for x in parts], dim=1)

    def _dequantized_keys(self, layer: int, groups: range) -> Tensor:
        """Return a layer's keys `[kv_heads, tokens, head_dim]` in fp32 of quantised groups."""
        some = self._groups_of(layer, groups)
        return dequantize_keys(some, self.shape.head_dim, self.kind).flatten(1, 2)

    def near(self, capacity: int) -> PlainStore:
        return PlainStore(self.shape, capacity, self.dtype, self.device)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks as in `Store`, of whole groups; tokens of the ring and the sink as they are."""
        each = torch.arange(size // GROUP, device=self.device)
        some = self.groups.at(rows, chunks.unsqueeze(1) * len(each) + each)
        tokens = chunks.unsqueeze(1) * size + torch.arange(size, device=self.device)
        return self._with_exact(rows, tokens, self._dequantize(some))

    def _with_exact(self, rows: Tensor, tokens: Tensor, rounded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens `[n, size]` of rows: `rounded`, but as they are in the ring and the sink."""
        block = tokens // BLOCK
        slots = torch.where(block < SINK_BLOCKS, block, SINK_BLOCKS + block % self._ring.size)
        own = self._plain().flatten(0, 1)[rows.unsqueeze(1), :, slots * BLOCK + tokens % BLOCK]  # [n, size, 2, dim]
        is_exact = ((tokens < SINK) | (tokens >= self._oldest)).unsqueeze(-1)
        keys, values = (torch.where(is_exact, own[:, :, part], x) for part, x in enumerate(rounded))
        return keys, values

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        if tree is not None:
            return self._attend_tree(layer, q, start, tree, lse)
        if self.tiers is not None:
            return self._attend_tiers(self.tiers, layer, q, start, lse)
        runs = []
        for at, some in runs_of_one_kind(start, len(q)):
            result = GroupAccumulator(q[some], self.shape.kv_heads, self.kind)
            rows = slice(0, some.stop - some.start)
            self._attend_exact(layer, result, rows, at)
            self._attend_near(layer, result, rows, at // WINDOW * WINDOW // GROUP)
            runs.append(result.output(None if lse is None else lse[some]))
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        for at, some in runs_of_windows(start, len(q)):
            window, end = at // WINDOW * WINDOW, start + some.stop
            keys = torch.cat([self._read(layer, 0, window)[0], self._read_ring(layer, window, end)[0]], dim=1)
            observe_attention(q[some], keys, lse[some], received[:, :end])

    def _attend_near(self, layer: int, result: GroupAccumulator, rows: slice, stop: int) -> None:
        """Add groups up to number `stop` that are in the device's memory: over tiers those of open pages."""
        if isinstance(self.groups, GroupMemory):
            result.attend_groups(rows, self.groups.memory[layer], 1, stop)
        elif self.tiers is not None:
            for page in range(self.tiers.num_whole, -(-stop // self.groups.each)):
                end = min(stop - page * self.groups.each, self.groups.each)
                result.attend_groups(rows, _open_groups(self.tiers, layer, page), _first_group(page), end)

    def _attend_tiers(self, tiers: GroupTiers, layer: int, q: Tensor, start: int, lse: Tensor | None) -> Tensor:
        result = GroupAccumulator(q, self.shape.kv_heads, self.kind)

        def newest() -> None:
            for at, some in runs_of_one_kind(start, len(q)):
                self._attend_exact(layer, result, some, at)
            self._attend_open(tiers, layer, result, start, len(q))

        self._attend_whole(tiers, layer, q, result, newest)
        return result.output(lse)

    def _attend_open(self, tiers: GroupTiers, layer: int, result: GroupAccumulator, start: int, tokens: int) -> None:
        """Add the groups of the pass's own pages: those of the windows before a token's own."""
        for page in range(tiers.num_whole, (start + tokens - 1) // self.span + 1):
            base, groups, first = page * self.span, _open_groups(tiers, layer, page), _first_group(page)
            low, high = (min(max(at, start), start + tokens) for at in (base, base + self.span))
            for at, some in runs_of_windows(low, high - low):
                rows = slice(some.start + low - start, some.stop + low - start)
                result.attend_groups(rows, groups, first, (at // WINDOW * WINDOW - base) // GROUP)
            if high < start + tokens:
                result.attend_groups(slice(high - start, tokens), groups, first, self.groups.each)

    def _attend_whole(
        self, tiers: GroupTiers, layer: int, q: Tensor, result: GroupAccumulator, newest: Callable[[], None]
    ) -> None:
        """Add what `newest` adds, and the whole pages before the pass, of which every row sees all."""
        rows = slice(0, len(q))

        def page(number: int, buffer: Tensor) -> None:
            result.attend_groups(rows, tiers.format.grains(buffer), _first_group(number), self.groups.each)

        tiers.attend(layer, q, result, page, newest)

    def _attend_exact(self, layer: int, result: GroupAccumulator, rows: slice, start: int) -> None:
        """Begin rows of one window, from position `start` on, with the tokens that they see as they are."""
        begin = 0 if start < SINK else max(start // WINDOW * WINDOW, SINK)
        sink = (self._sink_table, SINK) if begin else None
        tail = self._slot(begin // BLOCK) * BLOCK
        result.attend_exact(rows, *self._plain_layer(layer), sink, tail, start - begin)

    def _attend_rounded(self, layer: int, q: Tensor, stop: int) -> Partial:
        """Attend to quantised groups 1 to `stop` alone, of which every row sees all."""
        result = GroupAccumulator(q, self.shape.kv_heads, self.kind)
        newest = lambda: self._attend_near(layer, result, slice(0, len(q)), stop)  # noqa: E731
        if self.tiers is None:
            newest()
        else:
            self._attend_whole(self.tiers, layer, q, result, newest)
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
        if lse is not None:
            lse.copy_(own.lse)
        return own.out.to(q.dtype)

    def _attend_masked(self, layer: int, q: Tensor, start: int, before: list[int], tree: Tree) -> Partial:
        """Attend to tokens before a tree and to the tree, as they are."""
        key = start, len(tree), self._ring.size
        if self._places is None or self._places[0] != key:  # the same in all layers
            self._places = key, self._token_slots([*before, *range(start, start + len(tree))])
        sees = tree.on(self.device).sees[-len(q) :]
        mask = torch.cat((sees.new_ones((len(q), len(before))), sees), dim=1)
        return attend_masked(q, *(x[:, self._places[1]] for x in self._plain_layer(layer)), mask)

    def _attend_path(self, layer: int, q: Tensor, start: int, path: list[int]) -> Partial:
        """Attend with one query to a path from `start` on, across the end of the window, to the window and the sink."""
        first = max(start // WINDOW * WINDOW, SINK)
        border = start // WINDOW * WINDOW + WINDOW
        tokens = [*range(first, start), *(start + token for token in path)]
        slots = self._token_slots([*range(SINK), *tokens])
        keys, values = (x[:, slots] for x in self._plain_layer(layer))
        window = slice(SINK, SINK + border - first)
        both = [x[:, window].unflatten(1, (-1, GROUP)) for x in (keys, values)]
        keys[:, window], values[:, window] = self._dequantize(quantize_groups(*both, self.kind))
        return attend(q, keys, values)


def runs_of_one_kind(start: int, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield tokens by their windows, as `runs_of_windows` does, those of the sink apart."""
    of_sink = min(max(SINK - start, 0), tokens)
    if of_sink:
        yield start, slice(0, of_sink)
    for at, some in runs_of_windows(start + of_sink, tokens - of_sink):
        yield at, slice(some.start + of_sink, some.stop + of_sink)


def _open_groups(tiers: GroupTiers, layer: int, page: int) -> Tensor:
    """View an open page as `[kv_heads, groups, bytes]`."""
    return tiers.format.grains(tiers.open_pages.buffer(layer, page))


def _first_group(page: int) -> int:
    """Return the first group of a page that is attended to quantised."""
    return SINK // GROUP if page == 0 else 0


def _consecutive(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive slots: the first one, and how many."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[first], index - first
            first = index


def _runs_of_groups(groups: range, slots: list[int]) -> Iterator[tuple[range, int]]:
    """Yield runs of a few groups whose slots follow each other: groups, and the first slot."""
    first = 0
    for index in range(1, len(groups) + 1):
        is_end = index == len(groups) or index - first == _QUANTIZED_AT_ONCE
        if is_end or slots[index] != slots[index - 1] + GROUP // BLOCK:
            yield groups[first:index], slots[first]
            first = index
