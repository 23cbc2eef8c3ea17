"""The retrieval cache for a target that runs on nothing else: few keys are read, and all are kept for selections."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..memory.block_store import BlockStore
from ..memory.plain_store import PlainStore, attend_stored
from ..memory.tree_attention import Tree
from ..settings.config import Speculation
from ..settings.method_sizes import selected_chunk
from .approximate import ApproximateCache
from .block_table import blocks_of
from .chunk_scores import KeptMeanKeys
from .full import FullCache

ROOM = 64  # tokens of a pass, which share a selection
REBUILD_EVERY = 8  # tokens of an answer that share one


class RetrievedCache(ApproximateCache):
    """Attends to the first `sink` tokens, the latest `window` ones, and the chunks that a pass's queries score highest.

    These are `budget` tokens before the pass, in whole chunks. Each layer and KV head selects with the queries of the
    pass itself: a chunk's score is the sum over queries of the softmax of their products with the chunks' mean keys.
    A selection by a single token also serves the tokens that follow it one by one, `every` in all. Positions are those
    of the sequence. Keys and values are never dropped.

    Tokens of a pass share a selection, so their keys depend on where passes begin and end: in a prompt at multiples of
    ROOM, but an answer's tokens are run one by one. A prompt that goes on from `restartable` tokens has the bits of one
    without cached tokens.
    """

    is_dumpable = True
    passes = ROOM  # tokens of each pass of a prompt

    def __init__(self, full: FullCache, settings: Speculation) -> None:
        super().__init__(full, settings)
        sink, window, budget = settings.sink, settings.window, settings.kept_tokens
        self._chunk = chunk = selected_chunk(settings, full.store.grain, tokens=full.capacity)
        self._every = settings.rebuild_every or REBUILD_EVERY
        assert isinstance(full.store, BlockStore | PlainStore), "all keys are in one memory"
        self._sink, self._recent = -(-sink // chunk), -(-window // chunk)  # chunks
        self._scored = max(budget // chunk - self._sink - self._recent, 1)
        shape, device = full.store.shape, full.store.device
        self._means = KeptMeanKeys(full.store, chunk, full.capacity // chunk)
        self._whole = 0  # whole chunks before the pass
        self._first = torch.arange(self._sink, device=device).expand(shape.kv_heads, -1)
        self._chunks: list[Tensor] = []  # of each layer, selected at the position `_selected_at`: [kv_heads, chunks]
        self._tables: list[Tensor] = []  # the same as blocks, with those of the tail
        self.identity = ("retrieval", sink, window, budget, chunk)
        self._num_aligned = 0  # tokens of the first passes that had ROOM tokens each
        self._tail, self._selected_at = 0, -1  # the chunk where the tail begins; -1: select again
        self._reuses = False

    @property
    def room(self) -> int:
        return ROOM - self.length % ROOM

    def continues(self, length: int) -> bool:
        """Return whether a pass can follow `length` committed tokens: always, with full attention in all layers."""
        return True

    def holds(self, start: int) -> bool:
        """Return whether all keys and values of the tokens from position `start` on are there."""
        return self._full.holds(start)

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of the keys and values of tokens, as `FullCache.dump`."""
        return self._full.dump(start, end)

    def restartable(self, length: int) -> int:
        return min(self._num_aligned, length // ROOM * ROOM)

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        self._full.begin(tokens)
        self._whole = self.length // self._chunk
        age = self.length - self._selected_at
        self._reuses = self._selected_at >= 0 and tokens == 1 and age < self._every
        if not self._reuses:
            self._selected_at = -1  # until `commit`
            self._tail, self._chunks, self._tables = self._whole - self._recent, [], []
            if self._selects:
                self._means.extend(self._whole)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        q, start = self._full.append(layer, q, k, v)
        if not self._selects:
            return self.store.attend(layer, q, start)
        if not self._reuses:
            self._select(layer, q)
        if isinstance(self.store, BlockStore):
            seen = self._chunks[layer].shape[1] * self._chunk + start - self._tail * self._chunk + 1
            return self.store.attend_table(layer, q, self._tables[layer], seen)
        return self._attend_plain(layer, q, start)

    def _select(self, layer: int, q: Tensor) -> None:
        """Select chunks of a layer, the next one after those selected."""
        scores = self._scores(layer, q, self._tail)
        chosen = self._sink + scores.topk(self._scored, sorted=False).indices.sort().values
        self._chunks.append(torch.cat((self._first, chosen), dim=1))
        if isinstance(self.store, BlockStore):
            self._tables.append(self._table(self._chunks[layer], self.length + len(q) + self._every))

    def _scores(self, layer: int, q: Tensor, tail: int) -> Tensor:
        """Return the scores of the chunks between the sink and the tail, `[kv_heads, chunks]`."""
        means = self._means.of(layer)[:, self._sink : tail]
        grouped = q.unflatten(1, (len(means), -1)).permute(1, 0, 2, 3).flatten(1, 2)  # [kv_heads, queries, head_dim]
        products = torch.bmm(grouped, means.transpose(1, 2)).float() * q.shape[-1] ** -0.5
        return products.softmax(dim=-1).sum(dim=1)

    def _table(self, chunks: Tensor, end: int) -> Tensor:
        """Return the blocks of chunks `[kv_heads, n]` and of the tail, up to position `end`, in int32."""
        grain = self.store.grain
        each, last = self._chunk // grain, -(-min(end, self._full.capacity) // grain)
        return blocks_of(chunks, each, self._tail * each, last).to(torch.int32)

    def _attend_plain(self, layer: int, q: Tensor, start: int) -> Tensor:
        """Attend to copies of the chunks and to the tail."""
        chunks, tail = self._chunks[layer], self._tail * self._chunk
        each = torch.arange(self._chunk, device=chunks.device)
        tokens = (chunks.unsqueeze(-1) * self._chunk + each).flatten(1).unsqueeze(-1).expand(-1, -1, q.shape[-1])
        kv = (torch.cat((x.gather(1, tokens), x[:, tail : start + len(q)]), dim=1) for x in self.store.layer(layer))
        return attend_stored(q, *kv)

    def commit(self, keep: Sequence[int] | None = None) -> None:
        before = self.length
        super().commit(keep)
        if before == self._num_aligned and self.length == before + ROOM:
            self._num_aligned = self.length
        if self._selects and not self._reuses:
            self._selected_at = before if self.length == before + 1 else -1

    @property
    def _selects(self) -> bool:
        """Return whether there are more tokens before the pass than the budget."""
        return self._whole > self._sink + self._scored + self._recent

    def restore(self, tokens: int, kv: Tensor) -> None:
        """Commit whole passes without running them, from what `Store.dump` of another cache of this kind returned."""
        assert tokens % ROOM == 0 and self.length == self._num_aligned, "whole passes behind whole passes"
        self._selected_at = -1
        self._full.restore(tokens, kv)
        self._num_aligned = self.length  # last: after an interrupt fewer count

    def truncate(self, length: int) -> int:
        self._means.truncate(length // self._chunk)
        self._num_aligned = self.restartable(length)
        self._selected_at = -1
        return self._full.truncate(length)
