"""Forward passes of a few tokens on the native kernel: their calls are recorded once, and then run by one call."""

import ctypes
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...caches.protocol import KVCache, RecordableCache
from ...kernels.native.ops import NativeOperations
from ...kernels.native.recording import LINEAR, NORM, PassInputs, RecordedLayers, SequenceCalls
from ...memory.tree_attention import Tree
from ...model.decoder import Model, joined
from ...settings.method_sizes import KEPT_QUERIES

_Recorded = "OrderedDict[Hashable, SequenceCalls]"  # of a cache, by key
_Begun = tuple["RecordableCache", Hashable, "PassInputs"]  # a cache, and what its `begin_recorded` has returned
_MOST_KEYS = 8  # recordings of a cache: it is plain, or has a tree, whose queries are kept at some place


class PassRecorder:
    """Runs a model's passes over one or more caches, of up to `rows` rows together, from recordings.

    The layers are recorded once, with the embedding and the output head where the kernel computes those alone, and each
    cache once for each key that its `begin_recorded` returns.
    """

    def __init__(self, model: Model, rows: int) -> None:
        self.rows = rows
        self._model, self._operations = model, cast("NativeOperations", model.operations)
        self.recordings = 0  # of caches so far
        self._ids = (ctypes.c_int64 * rows)()
        with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
            self._id_tensor = torch.frombuffer(self._ids, dtype=torch.int64)
            self._rows = torch.empty((rows, model.shape.hidden), dtype=model.dtype)
        self._attended: list[tuple[Tensor, ...]] = []  # for each layer q, k, v and the result, of all rows
        with self._operations.record() as self._recording:
            embedded = model.embed(self._id_tensor) if model.scales_nothing else self._rows
            self._embeds = bool(self._recording.kinds)
            self._hidden = model.layer_rows(embedded if self._embeds else self._rows, self)
        with self._operations.record() as head:
            logits = model.logits(self._hidden[0]) if model.scales_nothing else torch.empty(0)
        self.has_scores = set(head.kinds) == {NORM, LINEAR}
        self._layers = RecordedLayers(self._recording, head)
        self._logits = {rows: logits}  # by the rows of a pass
        self._recorded: WeakKeyDictionary[RecordableCache, _Recorded] = WeakKeyDictionary()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Note where a layer's queries, keys and values are, and where its attention is to be, while it is recorded."""
        out = torch.empty(q.shape, dtype=q.dtype)
        self._attended.append((q, k, v, out))
        self._recording.add_layer(layer)
        return out

    def run(self, ids: Tensor, begun: Sequence[_Begun]) -> Tensor:
        """Run a pass of `ids` `[tokens]`, those of each sequence together; return hidden rows `[tokens, hidden]`.

        `begun` are for each sequence its cache, and what `begin_recorded` has returned.
        """
        self._run(ids.tolist(), begun)
        hidden = [part[: len(ids)] for part in self._hidden]
        return hidden[0].clone() if len(hidden) == 1 else joined(hidden)  # the next pass writes to the same memory

    def scores(self, ids: Sequence[int], begun: Sequence[_Begun]) -> Tensor:
        """Run a pass as `run` does; return logits `[tokens, vocab]`, valid until the next pass, if it `has_scores`."""
        self._run(ids, begun, with_head=True)
        if len(ids) not in self._logits:
            self._logits[len(ids)] = self._logits[self.rows][: len(ids)]
        return self._logits[len(ids)]

    def _run(self, ids: Sequence[int], begun: Sequence[_Begun], with_head: bool = False) -> None:
        sequences = [(self._find(cache, key, inputs.tokens), inputs) for cache, key, inputs in begun]
        self._ids[: len(ids)] = ids
        if not self._embeds:
            self._rows[: len(ids)].copy_(self._model.embed(self._id_tensor[: len(ids)]))
        self._layers.run(self._operations.kernel, sequences, with_head)

    def _find(self, cache: RecordableCache, key: Hashable, tokens: int) -> SequenceCalls:
        recorded = self._recorded.setdefault(cache, OrderedDict())
        if key not in recorded:
            recorded[key] = self._record(cache, tokens)
            self.recordings += 1
            if len(recorded) > _MOST_KEYS:
                recorded.popitem(last=False)
        recorded.move_to_end(key)
        return recorded[key]

    def _record(self, cache: RecordableCache, tokens: int) -> SequenceCalls:
        """Record, without running it, what a cache does in a pass of `tokens` tokens, which it has begun."""
        operations, layers = self._operations, []
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

    @cached_property
    def _recorder(self) -> PassRecorder:
        return PassRecorder(self._model, KEPT_QUERIES)

    def serves(self, tokens: int, tree: Tree | None = None) -> bool:
        """Return whether a pass of so many tokens is recorded; longer ones gain little."""
        return tokens <= KEPT_QUERIES

    @property
    def recordings(self) -> int:
        """How many passes have been recorded before they ran: those took longer than others."""
        return self._recorder.recordings if "_recorder" in self.__dict__ else 0

    def prepare(self, tokens: int) -> None:
        """Do nothing: to record a pass takes no longer than to run it call by call."""

    def forward(self, ids: Tensor, tree: Tree | None = None) -> Tensor:
        """Run `Model.forward` over the cache, or `Model.forward_tree`."""
        hidden = self._recorder.run(ids, [(self._cache, *self._cache.begin_recorded(len(ids), tree))])
        self._cache.commit() if tree is None else self._cache.hold()
        return hidden

    def scores(self, ids: Sequence[int]) -> Tensor | None:
        """Run `Model.forward`; return logits `[tokens, vocab]`, valid until the next pass; None if not recorded."""
        if len(ids) > KEPT_QUERIES or not self._recorder.has_scores:
            return None
        logits = self._recorder.scores(ids, [(self._cache, *self._cache.begin_recorded(len(ids)))])
        self._cache.commit()
        return logits


def recorded_passes(model: Model, cache: KVCache) -> RecordedPasses | None:
    """Return a model's recorded passes over a cache, or None if they are not native kernel calls alone."""
    is_recordable = model.is_recordable and cache.is_recordable
    return RecordedPasses(model, cache) if is_recordable else None
