"""The decoder: embedding, layers, final norm and output head. The cache computes attention and stores the KV.

Rows are flat, `[tokens, hidden]`, whichever sequence they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.layer_spec import FULL, LINEAR, SLIDING
from ..architecture.rope import Rope
from ..caches.full import FullCache
from ..caches.protocol import Attends, KVCache
from ..caches.recurrent_states import States
from ..events import ExpertsRun
from ..kernels.ops import Linear, Operations
from ..memory.factory import new_store
from ..memory.store import Store
from ..memory.tree_attention import Tree
from ..memory.window_rings import Windows
from ..parallel import ALONE, Group
from ..settings.kv_formats import BF16
from .layer import Layer, LayerPass
from .native_pass import NativePass, native_pass
from .row_inputs import NO_INPUTS, LayerEmbeddings, RowInputs, query_scales

_ATTEND = {FULL: "attend", SLIDING: "attend_window", LINEAR: "attend_linear"}  # by the kind of a layer


class Model:
    """A decoder with its weights on one device in one dtype."""

    def __init__(
        self,
        shape: ModelShape,
        operations: Operations,
        embedding: Callable[[Tensor], Tensor],
        layers: Iterable[Layer],
        norm: Tensor,
        head: Linear,
        group: Group = ALONE,
        norm_bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        layer_embeddings: LayerEmbeddings | None = None,
    ) -> None:
        """Create a model from its weights.

        Args:
            shape: the model's shape; with tensor parallelism, this rank's share of it.
            embedding: maps token ids `[tokens]` to rows `[tokens, hidden]`.
            layers: a layer needs to be in memory only from when it is taken from the iterator until the next one is.
            group: the ranks that share the model; the linears sum over them, so that hidden rows are complete.
            dtype: that of the rows; None for that of `norm`.
            layer_embeddings: those that each layer has of its own, if there are any.
        """
        self.shape = shape
        self.group = group
        self.operations = operations
        self.kv = BF16  # the format of a new cache's keys and values
        self.barred: Tensor | None = None  # see `bar`
        self.experts_run: Callable[[], ExpertsRun] | None = None  # what those in host memory have done; None without
        self.taps: tuple[int, ...] = ()  # see `tap`
        self.embedding = embedding
        self._layers, self._layer_embeddings = layers, layer_embeddings
        self.final_norm, self._norm_bias = norm, norm_bias  # before the output head, `[hidden]`
        self.dtype = dtype or norm.dtype
        scale = shape.embedding_scale
        self._embedding_scale = torch.tensor(scale, dtype=self.dtype).item() if shape.rounds_embedding_scale else scale
        self._passes = [LayerPass(spec, shape, operations) for spec in shape.specs]
        self.output_head = head
        self._read_costs: dict[int, float] = {}  # by tokens
        self._progress = (0, 0)  # tokens of the forward pass under way, and the layers that it has run

    @property
    def pass_tokens(self) -> float:
        """Return the progress of the current forward pass: its tokens times the share of its layers that are done.

        It is 0 between passes. Any thread may ask, such as that of a progress bar."""
        tokens, layers = self._progress
        return tokens * layers / self.shape.layers

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    def bar(self, ids: Iterable[int]) -> None:
        """Set the tokens that the model must not propose when it drafts for another one; `logits` has them still."""
        own = [token for token in ids if token < self.shape.vocab]
        self.barred = torch.tensor(own, device=self.device) if own else None

    def tap(self, layers: Iterable[int]) -> None:
        """Leave from now on, behind each hidden row that a pass returns, the rows that enter some `layers`.

        They follow in the order of the layers: `[tokens, (1 + taps) * hidden]`. The output itself, which the number of
        layers stands for, is always there. See `tapped`.
        """
        self.taps = tuple(sorted({layer for layer in layers if layer < self.shape.layers}))

    def rope(self, length: int) -> Rope:
        """Return the rotations for a sequence that may reach `length` tokens, for all of its caches to share."""
        return Rope(self.shape.full_attention, length, self.dtype, self.device)

    def sliding_rope(self, length: int) -> Rope | None:
        """Return the rotations of the layers that attend to a window, if there are any, as `rope` does."""
        if not self.shape.sliding_layers:
            return None
        return Rope(self.shape.sliding_attention, length, self.dtype, self.device)

    def new_cache(self, capacity: int, rope: Rope | None = None, store: Store | None = None) -> FullCache:
        """Return an empty full cache for `capacity` tokens; unless given, its rotations are for that length."""
        if store is None:
            shape = self.shape.full_attention
            store = new_store(self.operations.kernel, shape, capacity, self.dtype, self.device, self.kv)
        rope = rope or self.rope(capacity)
        return FullCache(store, rope, capacity, self._new_windows(rope.length, capacity), self.new_states())

    def new_states(self) -> States | None:
        """Return empty states for the layers with linear attention, if there are any."""
        if self.shape.linear is None:
            return None
        return States(self.shape.linear, self.dtype, self.device, self.operations.kernel)

    def _new_windows(self, length: int, capacity: int) -> Windows | None:
        """Return an empty ring for the layers that attend to a window, if there are any."""
        if (rope := self.sliding_rope(length)) is None:
            return None
        shape = self.shape.sliding_attention
        lends = self.shape.borrowing[1] > 0
        return Windows(shape, rope, self.dtype, self.device, self.operations.kernel, lends, capacity)

    def forward(self, ids: Tensor, cache: KVCache, tree: Tree | None = None) -> Tensor:
        """Run `ids` `[tokens]` as the continuation of the tokens in `cache`, and commit them there.

        With a `tree`, they are its last tokens; those before them are held in `cache`, where all are held afterwards.
        Returns the hidden rows `[tokens, hidden]` before the final norm, as `logits` takes them, and behind each those
        of the layers in `taps`.
        """
        with torch.inference_mode():
            cache.begin(len(ids), tree)
            x = self.through(ids, cache)
            cache.commit() if tree is None else cache.hold()
            return x

    def through(self, ids: Tensor, cache: Attends) -> Tensor:
        """Run `forward` without `begin` and `commit`, which the caller does. Returns `[tokens, hidden]`."""
        x = self.embed(ids)
        if self._native_pass is not None and (rows := self._native_pass.run(x, cache, self.taps)) is not None:
            return joined(rows)
        tapped, inputs = [], NO_INPUTS
        if not self.shape.takes_rows_alone:
            own = self._layer_embeddings
            embeddings = None if own is None else own.rows(ids, x, self.shape.norm_eps)
            inputs = RowInputs(self._query_scales(cache), embeddings)
        for index, layer in enumerate(self._layers):
            if index in self.taps:
                tapped.append(x.clone())
            x = self._run_layer(index, layer, x, cache, inputs)
            self._progress = (len(x), index + 1)
        self._progress = (0, 0)
        return joined([x, *tapped])

    def _run_layer(self, index: int, layer: Layer, x: Tensor, cache: Attends, inputs: RowInputs) -> Tensor:
        """Return the rows behind layer number `index` in the pass that `cache` has begun; `x` may be overwritten."""
        kind, number = self.shape.places[index]
        attend = partial(getattr(cache, _ATTEND[kind]), number)
        return self._passes[index % len(self._passes)].run(layer, x, attend, inputs.layer(index))

    def embed(self, ids: Tensor) -> Tensor:
        """Return the rows `[tokens, hidden]` of the embedding for `ids` `[tokens]`."""
        rows = self.embedding(ids)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def _query_scales(self, cache: Attends) -> Tensor | None:
        """Return the factors of the queries in the pass that `cache` has begun; None if there are none."""
        scaling = self.shape.query_scaling
        return None if scaling is None else query_scales(*scaling, cache.positions(), self.dtype)

    @cached_property
    def _native_pass(self) -> NativePass | None:
        return native_pass(self, self._layers)

    @property
    def read_cost(self) -> float:
        """Return the bytes of weights that a step reads from the device's memory; those over a link count more."""
        return self.read_cost_of(1)

    def read_cost_of(self, tokens: int) -> float:
        """Return `read_cost` of a pass of `tokens` tokens, which reads more experts."""
        tokens = 1 if self.shape.experts is None else tokens
        if tokens not in self._read_costs:
            streamed = getattr(self._layers, "read_cost", None)
            layers = sum(layer.linear_bytes(tokens) for layer in self._layers) if streamed is None else streamed
            self._read_costs[tokens] = layers + sum(tensor.nbytes for tensor in self.output_head.tensors())
        return self._read_costs[tokens]

    def layers(self) -> Iterator[Layer]:
        """Iterate over the layers; one may be valid only until the next one is taken."""
        return iter(self._layers)

    @property
    def keeps_weights(self) -> bool:
        """Return whether the weights of all layers stay at fixed addresses, as CUDA graphs require."""
        return isinstance(self._layers, list)

    def forward_by_layers(
        self, ids: Tensor, cache: FullCache, chunk: int, rows: int = 1
    ) -> Generator[int, None, Tensor]:
        """Run `forward` layer by layer, each in chunks of `chunk` tokens: a layer's offloaded KV is then read once, not
        once a chunk.

        Yields the number of layers done, and returns the hidden rows of the last chunks, of `rows` tokens at least. If
        the generator is closed early, the cache stays at its committed length.
        """
        tapped: list[Tensor] = []
        last = slice(max(len(ids) - rows, 0) // chunk, None)
        with torch.inference_mode():
            cache.begin(len(ids), chunk=chunk)
            parts = [self.embed(part) for part in ids.split(chunk)]
            assert self.shape.runs_by_layers, "layers that attend to another one's windows"
            inputs = list(RowInputs(self._query_scales(cache)).split(chunk, len(ids)))
        for index, layer in enumerate(self._layers):
            if index in self.taps:
                tapped.append(torch.cat(parts[last]))
            with torch.inference_mode():  # not across a yield: the mode is a state of the thread
                for at, part in enumerate(parts):  # each replaces its input, so that the rows are in memory once
                    parts[at] = self._run_layer(index, layer, part, cache, inputs[at])
            yield index + 1
        with torch.inference_mode():  # what observes the pass keeps inference tensors
            cache.commit()
            end = parts[last]
            return joined([end[0] if len(end) == 1 else torch.cat(end), *tapped])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` in fp32 of hidden rows `[tokens, hidden]`, or of those with taps."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the rows `[tokens, hidden]` after the final norm, of hidden rows as `logits` takes them."""
        return self._passes[0].norm(hidden[:, : self.shape.hidden].contiguous(), self.final_norm, self._norm_bias)

    def tapped(self, rows: Tensor, layers: Iterable[int]) -> Tensor:
        """Return, of rows that a pass returned, those of some `layers` side by side: `[tokens, layers * hidden]`.

        `layers` are of `taps`, or the number of layers for the output, before the final norm.
        """
        parts = rows.split(self.shape.hidden, dim=1)
        return torch.cat(
            [parts[0 if layer == self.shape.layers else 1 + self.taps.index(layer)] for layer in layers], 1
        )

    def head(self, normed: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` in fp32 of rows `[tokens, hidden]` after the final norm."""
        logits = self.output_head.wide(normed)
        if self.shape.logit_scale != 1.0:
            logits.mul_(self.shape.logit_scale)
        cap = self.shape.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def joined(parts: list[Tensor]) -> Tensor:
    """Return rows of one width, side by side; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
