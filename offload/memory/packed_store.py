"""A full cache's store of keys and values in 12 bits without loss, `--kv packed`: every result has the bits of bf16.

Runs of 128 tokens are packed when they are committed. The newest tokens lie in a ring as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, kv_format
from ..kernels.native.layout import keys_of, mean_keys, values_of
from ..kernels.native.packed_kv import RUN_BLOCKS, pack_call, unpack_call
from ..kernels.native.structs import BLOCK
from ..settings.kv_formats import PACKED_KV, PLANE_KV
from .block_store import BlockStore, PlacedTables
from .host_memory import host_memory
from .store import ALL, Store
from .tree_attention import Tree

RUN = PACKED_KV.run
_UNPACKED_AT_ONCE = 32 * 2**20  # bytes of mean keys' blocks


class _PlainBlocks(BlockStore):
    """Blocks as they are: a ring of the newest ones, block b at b modulo `ring`, and behind it `room` for runs.

    Those are runs that cannot be packed. Positions are those of the ring.
    """

    def __init__(
        self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype, ring: int, room: int
    ) -> None:
        super().__init__(kernel, shape, (ring + room) * BLOCK, dtype)
        self.ring, self.room = ring, room
        self._table = self._numbers(0, -(-capacity // BLOCK)).to(torch.int32)

    def _numbers(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last) % self.ring

    def _places_of(self, positions: Tensor) -> Tensor:
        return positions % (self.ring * BLOCK)

    def rows_of(self, layers: slice) -> Tensor:
        """Return the blocks of some layers `[rows, ring + room, 2 * 16 * head_dim]`; rows as in `at`."""
        return self._blocks[layers].flatten(0, 1)

    def at(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return copies of blocks; a row is layer * kv_heads + KV head."""
        return self._blocks.flatten(0, 1)[rows, places]

    def copy(self, source: _PlainBlocks, layer: int, first: int) -> None:
        """Copy a layer's blocks of another ring, which begins with block `first`, and the runs behind it."""
        to, own = self._blocks[layer], source._blocks[layer]
        numbers = torch.arange(first, first + source.ring)
        to[:, numbers % self.ring] = own[:, numbers % source.ring]
        to[:, self.ring : self.ring + source.room] = own[:, source.ring :]


class PackedStore(Store):
    """Packed keys and values, attended to by the native kernel.

    Where a block lies, its place, is its number in the ring or behind it, or ~b: it is block b of the packed runs. The
    places of a layer and head say so of every block, so a pass has one block table. A run with too many unusual numbers
    stays as it is. Before tokens of a packed run are replaced, its others are unpacked to the ring: nothing is lost.
    """

    grain = BLOCK
    is_recordable = True

    @torch.inference_mode(False)
    def __init__(
        self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype, kind: str, tiers: None = None
    ) -> None:
        assert tiers is None and dtype == torch.bfloat16, "bf16 in one memory"
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cpu")
        self.kernel = self._kernel = kernel
        rows, runs = (shape.layers, shape.kv_heads), -(-capacity // RUN)
        self._runs = host_memory((*rows, runs, PACKED_KV.run_bytes(shape.head_dim)), torch.uint8)
        self._groups, self._planes = (
            [Groups(layer, kv_format(each)) for layer in self._runs.unbind()] for each in (kind, PLANE_KV.name)
        )
        self._plain = self._new_plain(2 * RUN_BLOCKS, 0)
        self._places = (torch.arange(runs * RUN_BLOCKS) % self._plain.ring).to(torch.int32).repeat(*rows, 1)
        self._counts = [0] * shape.layers  # of runs that have left the ring; -1: an interrupt came while they changed
        self._placed = PlacedTables()
        self._packs_late = False  # in the pass that has begun, as chunks arrive

    def _new_plain(self, ring: int, room: int) -> _PlainBlocks:
        capacity = self._runs.shape[2] * RUN
        return _PlainBlocks(self._kernel, self.shape, capacity, self.dtype, ring, room)

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        self._packs_late = chunk is not None
        if chunk is None:
            self._make_room_in_all(start, tokens, start)

    def begin_draft(self, start: int, tokens: int) -> None:
        self._packs_late = False
        if tokens:
            self._make_room_in_all(start, tokens, 0)

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        self._kernel.copy(source, target)

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        """Store tokens as in `Store`; of the first `stored`, already there, only queries are rotated."""
        if self._packs_late:
            self._make_room(layer, start, len(q), start)
        return self._plain.append(layer, start, q, k, v, rows, stored)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of its path as a chain."""
        return self._plain.attend_table(layer, q, self._places[layer], start + 1, tree, lse, self._groups[layer])

    def attend_plane(
        self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        return self._plain.attend_table(layer, q, self._places[layer], start + 1, tree, lse, self._planes[layer])

    def attend_table(
        self, layer: int, q: Tensor, table: Tensor, seen: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attend to the places of `table` `[kv_heads, blocks]`; see `BlockStore.attend_table`."""
        return self._plain.attend_table(layer, q, table, seen, tree, lse, self._groups[layer])

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks `[layers, kv_heads, n]` of the sequence, in all layers.

        It is in the same memory for the same `blocks`, and for the pass that has begun.
        """
        inside = blocks.long().clamp_(max=self._places.shape[2] - 1)  # no token is ever in the others
        return torch.gather(self._places, 2, inside, out=self._placed.of(blocks))

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        """Observe as `DeviceStore.observe`."""
        plain, table, groups = self._plain, self._places[layer], self._groups[layer]
        call = plain.calls.observation(plain.layer(layer), q, start + 1, lse, received, table, groups)
        self._kernel.observe(call)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        self._make_room_in_all(start, len(keep), start)
        self._plain.compact(start, keep)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        first = start // BLOCK
        some = slice(start - first * BLOCK, end - first * BLOCK)
        blocks = self._blocks_between(first, -(-end // BLOCK)).unflatten(0, self._places.shape[:2])
        keys, values = (of(blocks, self.shape.head_dim).flatten(2, 3)[:, :, some] for of in (keys_of, values_of))
        return keys, values

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of whole blocks as `BlockStore.dump`, unpacked: files do not depend on the format."""
        assert start % BLOCK == end % BLOCK == 0, "tokens are copied in whole blocks"
        found = self._blocks_between(start // BLOCK, end // BLOCK).unflatten(0, self._places.shape[:2])
        return found.contiguous()

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump`, here or of a BlockStore, returned, from position `start` on."""
        assert start % BLOCK == 0, "tokens are copied in whole blocks"
        end = start + kv.shape[2] * BLOCK
        while start < end:
            count = (min((start // RUN + 1) * RUN, end) - start) // BLOCK
            self._make_room_in_all(start, count * BLOCK, start)
            self._plain.load(start, kv[:, :, :count])
            start, kv = start + count * BLOCK, kv[:, :, count:]

    def near(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        each = size // BLOCK
        blocks = self._blocks_at(chunks.unsqueeze(1) * each + torch.arange(each), rows)
        keys, values = (of(blocks, self.shape.head_dim).flatten(1, 2) for of in (keys_of, values_of))
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        assert start % BLOCK == end % BLOCK == chunk % BLOCK == 0, "chunks are whole blocks"
        heads, each = self.shape.kv_heads, chunk // BLOCK
        step = max(_UNPACKED_AT_ONCE // (chunk * heads * self.shape.head_dim * 4), 1) * chunk
        parts = [torch.empty(heads, 0, self.shape.head_dim)]
        for at in range(start, end, step):
            blocks = self._blocks_between(at // BLOCK, min(at + step, end) // BLOCK, slice(layer, layer + 1))
            means = mean_keys(blocks, self.shape.head_dim)
            parts.append(means.unflatten(1, (-1, each)).mean(2))
        return torch.cat(parts, dim=1)

    def _blocks_between(self, first: int, last: int, layers: slice = ALL) -> Tensor:
        """Return copies of blocks `first` to `last` - 1 of some layers as they were, `[rows, n, 2 * 16 * head_dim]`."""
        begin, end = first // RUN_BLOCKS, -(-last // RUN_BLOCKS)
        rows = torch.arange(self.shape.layers * self.shape.kv_heads).view(self.shape.layers, -1)[layers].flatten()
        places = self._places[layers].flatten(0, 1).unflatten(1, (-1, RUN_BLOCKS))[:, begin:end]
        found = torch.empty((*places.shape, 2 * BLOCK * self.shape.head_dim), dtype=self.dtype)
        row, run = (places[..., 0] < 0).nonzero(as_tuple=True)
        targets = (row * (end - begin) + run).unsqueeze(1) * RUN_BLOCKS + torch.arange(RUN_BLOCKS)
        self._unpack_runs(rows[row] * self._runs.shape[2] + begin + run, targets, found.flatten(0, 2))
        row, run = (places[..., 0] >= 0).nonzero(as_tuple=True)
        found[row, run] = self._plain.at(rows[row].unsqueeze(1), places[row, run])
        return found.flatten(1, 2)[:, first - begin * RUN_BLOCKS : last - begin * RUN_BLOCKS]

    def _blocks_at(self, blocks: Tensor, rows: Tensor) -> Tensor:
        """Return copies of blocks of the sequence `[n, m]`, or `[m]`, as they were: `[n, m, 2 * 16 * head_dim]`.

        Each of the n `rows` is layer * kv_heads + KV head.
        """
        rows = rows.unsqueeze(1)
        places = self._places.flatten(0, 1)[rows, blocks]
        found, is_packed = self._plain.at(rows, places.clamp(min=0)), places < 0
        if is_packed.any():
            numbers = (rows * (self._runs.shape[2] * RUN_BLOCKS) + ~places)[is_packed]
            runs, order = (numbers // RUN_BLOCKS).unique(return_inverse=True)
            unpacked = torch.empty((len(runs) * RUN_BLOCKS, found.shape[2]), dtype=self.dtype)
            self._unpack_runs(runs, torch.arange(len(unpacked)).view(-1, RUN_BLOCKS), unpacked)
            found[is_packed] = unpacked[order * RUN_BLOCKS + numbers % RUN_BLOCKS]
        return found

    def _unpack_runs(self, runs: Tensor, targets: Tensor, blocks: Tensor) -> None:
        """Unpack runs `[n]`, numbered through all layers and heads, to `targets` `[n, 8]` of `blocks` `[m, ...]`."""
        items = torch.cat((torch.stack((torch.zeros_like(runs), runs), 1), targets), 1).to(torch.int32)
        packed = self._runs.view(1, -1, self._runs.shape[3])
        self._kernel.pack_runs(unpack_call(packed, items, blocks.unsqueeze(0)))

    def _make_room_in_all(self, start: int, tokens: int, committed: int) -> None:
        counts, last = set(self._counts), committed // RUN
        if len(counts) == 1 and 0 <= (first := counts.pop()) < last and first * RUN <= start:
            self._pack(range(self.shape.layers), first, last)  # one call for all layers
        for layer in range(self.shape.layers):
            self._make_room(layer, start, tokens, committed)

    def _make_room(self, layer: int, start: int, tokens: int, committed: int) -> None:
        """Prepare the ring for tokens from position `start` on; runs before position `committed` may be packed."""
        count = self._counts[layer]
        if count < 0:
            count = self._counts[layer] = int(self._left_ring(layer, self._places.shape[2])[0].sum())
        if start < count * RUN:
            self._unpack(layer, start, count)
        elif count < committed // RUN:
            self._pack(range(layer, layer + 1), count, committed // RUN)
        needed = -(-(start + tokens) // RUN) - self._counts[layer]
        if needed * RUN_BLOCKS > self._plain.ring:
            self._resize(needed * RUN_BLOCKS, self._plain.room)

    def _left_ring(self, layer: int, blocks: int) -> Tensor:
        """Return for each head whether each of the runs in the first `blocks` blocks has left the ring."""
        places = self._places[layer, :, :blocks:RUN_BLOCKS]
        return (places < 0) | (places >= self._plain.ring)

    def _unpack(self, layer: int, start: int, count: int) -> None:
        """Put the run of position `start` into the ring, in which all later ones are then, too."""
        run, heads = start // RUN, self.shape.kv_heads
        numbers = torch.arange(run * RUN_BLOCKS, count * RUN_BLOCKS)
        places = (numbers % self._plain.ring).to(torch.int32)
        if start % RUN:
            rows = torch.arange(layer * heads, (layer + 1) * heads)
            found = self._blocks_at(numbers[:RUN_BLOCKS], rows)
            self._plain.layer(layer)[:, places[:RUN_BLOCKS].long()] = found
        self._counts[layer] = -1
        self._places[layer][:, numbers] = places
        self._counts[layer] = run

    def _pack(self, layers: range, first: int, last: int) -> None:
        """Pack runs `first` to `last` - 1 of some layers, which lie in the ring."""
        some, size = slice(layers.start, layers.stop), (len(layers), self.shape.kv_heads, last - first)
        numbers = torch.arange(first * RUN_BLOCKS, last * RUN_BLOCKS, dtype=torch.int32).view(size[2], RUN_BLOCKS)
        items = torch.empty((size[0] * size[1], size[2], 2 + RUN_BLOCKS), dtype=torch.int32)
        items[..., 0] = torch.arange(len(items)).unsqueeze(1)
        items[..., 1] = torch.arange(first, last)
        items[..., 2:] = numbers % self._plain.ring
        fits = torch.empty(size, dtype=torch.uint8)
        calls = self._plain.rows_of(some), self._runs[some].flatten(0, 1), items.flatten(0, 1), fits.view(-1)
        self._kernel.pack_runs(pack_call(*calls))
        places = (~numbers).repeat(*size[:2], 1, 1)
        if not fits.all():
            sources = items[: size[1], :, 2:].long()
            for layer, own, kept in zip(layers, fits, places, strict=True):
                self._keep(layer, first, sources, own == 0, kept)
        self._counts[some] = [-1] * len(layers)
        self._places[some, :, first * RUN_BLOCKS : last * RUN_BLOCKS] = places.flatten(2)
        self._counts[some] = [last] * len(layers)

    def _keep(self, layer: int, first: int, sources: Tensor, wanted: Tensor, places: Tensor) -> None:
        """Copy the wanted runs `[kv_heads, n]` from `sources` in the ring behind it, and set their places.

        Runs leave in order, and come back from the last one on: a head's lie one behind the other.
        """
        if not wanted.any():
            return
        ring = self._plain.ring
        kept = (self._places[layer, :, : first * RUN_BLOCKS : RUN_BLOCKS] >= ring).sum(1, keepdim=True)
        slots = kept + wanted.cumsum(1) - 1
        needed = (int(slots.max()) + 1) * RUN_BLOCKS
        if needed > self._plain.room:
            self._resize(ring, max(needed, self._plain.room * 3 // 2 // RUN_BLOCKS * RUN_BLOCKS))
        blocks, (heads, runs) = self._plain.layer(layer), wanted.nonzero(as_tuple=True)
        targets = ring + slots[heads, runs].unsqueeze(1) * RUN_BLOCKS + torch.arange(RUN_BLOCKS)
        blocks[heads.unsqueeze(1), targets] = blocks[heads.unsqueeze(1), sources[heads, runs]]
        places[heads, runs] = targets.to(torch.int32)

    @torch.inference_mode(False)
    def _resize(self, ring: int, room: int) -> None:
        """Make the ring, and the room behind it, of so many blocks; both only grow."""
        old, places = self._plain, self._places.clone()
        new = self._new_plain(ring, room)
        numbers = torch.arange(places.shape[2]) % ring
        for layer, own in enumerate(places):
            first = int(self._left_ring(layer, own.shape[1])[0].sum()) * RUN_BLOCKS
            new.copy(old, layer, first)
            own[:, first:] = numbers[first:].to(torch.int32)
            own[:, :first] += torch.where(own[:, :first] >= old.ring, ring - old.ring, 0).to(torch.int32)
        # At once: an interrupt, or too little memory, must leave the old ring.
        self._plain, self._places, self.moves = new, places, self.moves + 1
