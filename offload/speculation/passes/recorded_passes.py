"""Forward passes of a few tokens on the native kernel: their calls are recorded once, and then run by one call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...kernels.native.recording import RecordedLayers, SequenceCalls
from ...model.decoder import joined
from ...settings.method_sizes import KEPT_QUERIES

if TYPE_CHECKING:
    from ...caches.protocol import KVCache, RecordableCache
    from ...kernels.native.recording import PassInputs
    from ...memory.tree_attention import Tree
    from ...model.decoder import Model

_Recorded = tuple[int, "OrderedDict[Hashable, SequenceCalls]"]  # of a cache, by key, after so many of its moves
_MOST_KEYS = 8  # recordings of a cache: it is plain, or has a tree, whose queries are kept at some place


def recorded_passes(model: Model, cache: KVCache) -> RecordedPasses | None:
    """Return a model's recorded passes over a cache, or None if they are not native kernel calls alone."""
    is_recordable = model.is_recordable and cache.is_recordable
    return RecordedPasses(model, cache) if is_recordable else None


class PassRecorder:
    """Runs a model's passes over one or more caches, of up to `rows` rows together, from recordings.

    The layers are recorded once, each cache once for each key that its `begin_recorded` returns.
    """

    def __init__(self, model: Model, rows: int) -> None:
        self.rows = rows
        self._model = model
        self.recordings = 0  # of caches so far
        with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
            self._rows = torch.empty((rows, model.shape.hidden), dtype=model.dtype)
        self._attended: list[tuple[Tensor, ...]] = []  # for each layer q, k, v and the result, of all rows
        with model.operations.record() as self._recording:
            self._hidden = model.layer_rows(self._rows, self)
        self._layers = RecordedLayers(self._recording)
        self._recorded: WeakKeyDictionary[RecordableCache, _Recorded] = WeakKeyDictionary()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Note where a layer's queries, keys and values are, and where its attention is to be, while it is recorded."""
        out = torch.empty(q.shape, dtype=q.dtype)
        self._attended.append((q, k, v, out))
        self._recording.add_layer(layer)
        return out

    def run(self, ids: Tensor, begun: Sequence[tuple[RecordableCache, Hashable, PassInputs]]) -> Tensor:
        """Run a pass of `ids` `[tokens]`, those of each sequence together; return hidden rows `[tokens, hidden]`.

        `begun` are for each sequence its cache, and what `begin_recorded` has returned.
        """
        sequences = [(self._find(cache, key, len(inputs.rows[0])), inputs) for cache, key, inputs in begun]
        self._rows[: len(ids)].copy_(self._model.embed(ids))
        self._layers.run(self._model.operations.kernel, sequences)
        hidden = [part[: len(ids)] for part in self._hidden]
        return hidden[0].clone() if len(hidden) == 1 else joined(hidden)  # the next pass writes to the same memory

    def _find(self, cache: RecordableCache, key: Hashable, tokens: int) -> SequenceCalls:
        moves, recorded = self._recorded.get(cache, (-1, OrderedDict()))
        if moves != cache.moves:
            self._recorded[cache] = cache.moves, (recorded := OrderedDict())  # the others refer to memory that is gone
        if key not in recorded:
            recorded[key] = self._record(cache, tokens)
            self.recordings += 1
            if len(recorded) > _MOST_KEYS:
                recorded.popitem(last=False)
        recorded.move_to_end(key)
        return recorded[key]

    def _record(self, cache: RecordableCache, tokens: int) -> SequenceCalls:
        """Record, without running it, what a cache does in a pass of `tokens` tokens, which it has begun."""
        operations, layers = self._model.operations, []
        for layer, (*rows, out) in enumerate(self._attended):
            with operations.record() as recording:
                attended = cache.attend(layer, *(x[:tokens] for x in rows))
                operations.kernel.copy(attended, out[:tokens], joins=True)
            layers.append(recording)
        return SequenceCalls(layers)


class RecordedPasses:
    """Runs a model's passes over one cache from recordings."""

    def __init__(self, model: Model, cache: RecordableCache) -> None:
        self._model, self._cache = model, cache
        self._recorder: PassRecorder | None = None

    def serves(self, tokens: int, tree: Tree | None = None) -> bool:
        """Return whether a pass of so many tokens is recorded; longer ones gain little."""
        return tokens <= KEPT_QUERIES

    @property
    def recordings(self) -> int:
        """How many passes have been recorded before they ran: those took longer than others."""
        return 0 if self._recorder is None else self._recorder.recordings

    def prepare(self, tokens: int) -> None:
        """Do nothing: to record a pass takes no longer than to run it call by call."""

    def forward(self, ids: Tensor, tree: Tree | None = None) -> Tensor:
        """Run `Model.forward` over the cache, or `Model.forward_tree`."""
        begun = self._cache.begin_recorded(len(ids), tree)
        if self._recorder is None:
            self._recorder = PassRecorder(self._model, KEPT_QUERIES)
        hidden = self._recorder.run(ids, [(self._cache, *begun)])
        self._cache.commit() if tree is None else self._cache.hold()
        return hidden
