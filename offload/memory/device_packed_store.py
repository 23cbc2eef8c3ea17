"""A full cache's store on a GPU of keys and values in 12 bits without loss, `--kv packed`, for Triton's kernels.

Runs of 128 tokens are packed when a pass begins behind them. The newest tokens lie in a ring as they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows
from ..kernels.attention import attend_masked, merge
from ..kernels.triton import ROWS
from ..kernels.triton.accumulate import attend_packed, attend_packed_before
from ..kernels.triton.ops import pack_runs, unpack_runs
from ..settings.kv_formats import PACKED_KV
from .plain_store import PlainStore, attend_stored
from .quantized_memory import Ring
from .store import Store
from .tree_attention import Tree

RUN = PACKED_KV.run
_UNPACKED_AT_ONCE = 32 * 2**20  # bytes of mean keys' keys


class _Places(NamedTuple):
    """Where runs lie, `[layers, kv_heads, runs]` in int32: ~n is packed run n, and n run n of plain memory.

    `counts`: of each layer, how many runs have left the ring. Run r of the ring is r modulo its size.
    """

    runs: Tensor
    counts: tuple[int, ...]


class DevicePackedStore(Store):
    """Packed keys and values, attended to where they are, by `attend_runs`; passes of more rows unpack them first.

    A run that has too many unusual numbers is copied behind the ring. Before tokens of a packed run are replaced, the
    others are unpacked to the ring. Whether new runs fit is waited for, once in 128 tokens.
    """

    least_chunk = 1

    @torch.inference_mode(False)
    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        tiers: None = None,
    ) -> None:
        assert tiers is None and dtype == torch.bfloat16, "bf16 in one memory"
        self.shape, self.dtype, self.device = shape, dtype, device
        rows, runs = (shape.layers, shape.kv_heads), -(-capacity // RUN)
        size = (*rows, runs, PACKED_KV.run_bytes(shape.head_dim))
        self._runs = torch.empty(size, dtype=torch.uint8, device=device)
        self._plain = self.new_device_store(2 * RUN)
        self._ring = Ring(2 * RUN, self._plain)
        self._places = _Places((torch.arange(runs) % 2).to(torch.int32).repeat(*rows, 1), (0,) * shape.layers)
        self._table = self._places.runs.to(device)  # the same on the device
        self._is_stale = False  # an interrupt came while the table changed
        self._chunked = False  # of the last pass of the full cache
        self._slots: tuple[tuple[int, int, int], Tensor] | None = None  # of a tree's tokens, and what they depend on

    def new_device_store(self, capacity: int) -> PlainStore:
        return PlainStore(self.shape, capacity, self.dtype, self.device)

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        self._chunked = chunk is not None
        if chunk is None:
            self._make_room(range(self.shape.layers), start, tokens)

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        if self._chunked:
            self._make_room(range(layer, layer + 1), start, len(q))
        return self._ring.append(layer, start, q, k, v, rows, stored)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        if tree is not None:
            return self._attend_tree(layer, q, start, tree, lse)
        if len(q) <= ROWS:
            return attend_packed(q, self._memory(layer), start + 1, lse)
        return attend_stored(q, *self._unpacked(layer, start + len(q)), lse)

    def _memory(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a layer as `attend_runs` takes it."""
        return self._runs[layer], self._table[layer], *self._plain.layer(layer)

    def _unpacked(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of a layer's keys and values `[kv_heads, end, head_dim]`."""
        keys, values = self.read(0, end, range(layer, layer + 1))
        return keys[0], values[0]

    def _attend_tree(self, layer: int, q: Tensor, start: int, tree: Tree, lse: Tensor | None) -> Tensor:
        """Attend as `attend_tree` of plain keys and values does."""
        key = start, len(tree), self._ring.size
        if self._slots is None or self._slots[0] != key:  # the same in all layers
            self._slots = key, self._ring.places(range(start, start + len(tree)))
        keys, values = (x[:, self._slots[1]] for x in self._plain.layer(layer))
        part = attend_masked(q, keys, values, tree.on(self.device).sees[-len(q) :])
        part = merge([attend_packed_before(q, self._memory(layer), start), part]) if start else part
        return part.output(lse, q.dtype)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        self._ring.compact(start, keep)

    def read(self, start: int, end: int, layers: range | None = None) -> tuple[Tensor, Tensor]:
        layers, heads = layers or range(self.shape.layers), self.shape.kv_heads
        rows = torch.arange(layers.start * heads, layers.stop * heads, device=self.device)
        keys, values = self._gather(rows, torch.full_like(rows, start), end - start)
        assert values is not None
        return keys.unflatten(0, (-1, heads)), values.unflatten(0, (-1, heads))

    def _gather(self, rows: Tensor, starts: Tensor, size: int, has_values: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return copies `[n, size, head_dim]` of keys and values; a row is layer * kv_heads + KV head."""
        keys, values = (x.flatten(0, 1) for x in self._plain.read(0, self._plain.capacity))
        memory = self._runs.flatten(0, 1), self._table.flatten(0, 1), keys, values
        return unpack_runs(memory, rows, starts, size, has_values)

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy as `PlainStore.dump`, unpacked: files do not depend on the format."""
        return torch.stack(self.read(start, end), 3).cpu()

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump`, here or of a PlainStore, returned, from position `start` on."""
        end = start + kv.shape[2]
        while start < end:
            count = min((start // RUN + 1) * RUN, end) - start
            self._make_room(range(self.shape.layers), start, count)
            self._plain.load(self._ring.place(start), kv[:, :, :count])
            start, kv = start + count, kv[:, :, count:]

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        keys, values = self._gather(rows, chunks * size, size)
        assert values is not None
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        rows = torch.arange(layer * heads, (layer + 1) * heads, device=self.device)
        step = max(_UNPACKED_AT_ONCE // (chunk * heads * dim * 2), 1) * chunk
        parts = [torch.empty(heads, 0, dim, device=self.device)]
        for at in range(start, end, step):
            keys, _ = self._gather(rows, torch.full_like(rows, at), min(step, end - at), has_values=False)
            parts.append(keys.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32))
        return torch.cat(parts, dim=1)

    def _make_room(self, layers: range, start: int, tokens: int) -> None:
        """Prepare the ring for tokens of layers from position `start` on; runs before that are packed."""
        if self._is_stale:
            self._place(self._places)
        count = self._places.counts[layers.start]  # the same in all of them
        if start < count * RUN:
            self._unpack(layers, start, count)
        elif count < start // RUN:
            self._pack(layers, count, start // RUN)
        needed = -(-(start + tokens) // RUN) - self._places.counts[layers.start]
        if needed > self._ring_runs:
            self._resize(needed, self._plain.capacity // RUN - self._ring_runs)

    @property
    def _ring_runs(self) -> int:
        return self._ring.size // RUN

    def _place(self, places: _Places) -> None:
        """Set where runs lie, on the device and here. Recorded steps keep the address of the table."""
        self._is_stale = True
        self._table.copy_(places.runs)
        self._places = places
        self._is_stale = False

    def _moved(self, layers: range, runs: range, places: Tensor, count: int) -> _Places:
        """Return places in which some `runs` of layers lie at `places`, and `count` of them have left the ring."""
        moved, counts = self._places.runs.clone(), list(self._places.counts)
        moved[layers.start : layers.stop, :, runs.start : runs.stop] = places.to(torch.int32)
        counts[layers.start : layers.stop] = [count] * len(layers)
        return _Places(moved, tuple(counts))

    def _unpack(self, layers: range, start: int, count: int) -> None:
        """Put the run of position `start` into the ring, in which all later ones are then, too."""
        first = start // RUN
        if start % RUN:
            to = self._ring.place(first * RUN)
            for source, target in zip(
                self.read(first * RUN, start, layers), self._plain.read(0, to + RUN), strict=True
            ):
                target[layers.start : layers.stop, :, to : to + source.shape[2]] = source
        runs = range(first, count)
        self._place(self._moved(layers, runs, torch.arange(first, count) % self._ring_runs, first))

    def _pack(self, layers: range, first: int, last: int) -> None:
        """Pack runs `first` to `last` - 1 of layers, which lie in the ring; those that do not fit stay as they are."""
        some = slice(layers.start, layers.stop)
        keys, values = (x[some].flatten(0, 1) for x in self._plain.read(0, self._plain.capacity))
        packed = pack_runs(keys, values, self._runs[some].flatten(0, 1), first, last - first, self._ring_runs)
        fits = packed.cpu().unflatten(0, (len(layers), -1)).bool()  # [layers, kv_heads, runs]
        places = (~torch.arange(first, last)).expand(fits.shape).clone()
        if not fits.all():
            self._keep(layers, range(first, last), ~fits, places)
        self._place(self._moved(layers, range(first, last), places, last))

    def _keep(self, layers: range, runs: range, wanted: Tensor, places: Tensor) -> None:
        """Copy the wanted runs `[layers, kv_heads, n]` behind the ring, and set their places.

        Runs leave in order, and come back from the last one on: a head's lie one behind the other.
        """
        before = self._places.runs[layers.start : layers.stop, :, : runs.start]
        slots = (before >= self._ring_runs).sum(2, keepdim=True) + wanted.cumsum(2) - 1
        needed, room = int(slots.max()) + 1, self._plain.capacity // RUN - self._ring_runs
        if needed > room:
            self._resize(self._ring_runs, max(needed, room * 3 // 2))
        layer, head, run = wanted.nonzero(as_tuple=True)
        target = self._ring_runs + slots[layer, head, run]
        places[layer, head, run] = target
        rows = ((layer + layers.start) * self.shape.kv_heads + head).to(self.device)
        source = ((run + runs.start) % self._ring_runs).to(self.device)
        for x in self._plain.read(0, self._plain.capacity):
            memory = x.unflatten(2, (-1, RUN)).flatten(0, 1)
            memory[rows, target.to(self.device)] = memory[rows, source]

    @torch.inference_mode(False)
    def _resize(self, ring: int, room: int) -> None:
        """Make the ring, and the room behind it, of so many runs; both only grow."""
        old, places = self._plain, self._places.runs.clone()
        new, numbers = self.new_device_store((ring + room) * RUN), torch.arange(places.shape[2])
        for layer, (own, count) in enumerate(zip(places, self._places.counts, strict=True)):
            kept = torch.arange(old.capacity // RUN - self._ring_runs)
            alive = torch.arange(count, count + self._ring_runs)
            sources = torch.cat((alive % self._ring_runs, self._ring_runs + kept)).to(self.device)
            targets = torch.cat((alive % ring, ring + kept)).to(self.device)
            for to, source in zip(new.layer(layer), old.layer(layer), strict=True):
                to.unflatten(1, (-1, RUN))[:, targets] = source.unflatten(1, (-1, RUN))[:, sources]
            own[:, count:] = (numbers[count:] % ring).to(torch.int32)
            own[:, :count] += torch.where(own[:, :count] >= self._ring_runs, ring - self._ring_runs, 0).to(torch.int32)
        # At once: an interrupt, or too little memory, must leave the old ring.
        self._is_stale = True
        self._plain, self._ring, self._places = new, Ring(ring * RUN, new), _Places(places, self._places.counts)
        self._place(self._places)
