"""The decoder of the Llama family: embedding, norms, linears and MLP. The cache computes attention and stores the KV.

Rows are flat, `[tokens, hidden]`, whichever sequence they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .architecture.config import ModelShape
from .architecture.rope import Rope
from .kernels.ops import Linear, Operations
from .kv_cache.factory import new_store
from .kv_cache.full import Attends, FullCache, KVCache
from .kv_cache.store import Store
from .kv_cache.tree import Tree
from .parallel import ALONE, Group


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; q, k, v and gate, up are fused. The q and k norms are Qwen3's."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Linear  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]

    @property
    def linear_bytes(self) -> int:
        """Return the bytes of the weights that a pass multiplies with."""
        linears = (self.qkv, self.o, self.gate_up, self.down)
        return sum(tensor.nbytes for linear in linears for tensor in linear.tensors())


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
    ) -> None:
        """Create a model from its weights.

        Args:
            shape: the model's shape; with tensor parallelism, this rank's share of it.
            embedding: maps token ids `[tokens]` to rows `[tokens, hidden]`.
            layers: a layer needs to be in memory only from when it is taken from the iterator until the next one is.
            group: the ranks that share the model; the linears sum over them, so that hidden rows are complete.
        """
        self.shape = shape
        self.group = group
        self.operations = operations
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._progress = (0, 0)  # tokens of the forward pass under way, and the layers that it has run

    @property
    def pass_tokens(self) -> float:
        """Return the progress of the current forward pass: its tokens times the share of its layers that are done.

        It is 0 between passes. Any thread may ask, such as that of a progress bar."""
        tokens, layers = self._progress
        return tokens * layers / self.shape.layers

    @property
    def dtype(self) -> torch.dtype:
        return self._norm.dtype

    @property
    def device(self) -> torch.device:
        return self._norm.device

    def rope(self, length: int) -> Rope:
        """Return the rotations for a sequence that may reach `length` tokens, for all of its caches to share."""
        return Rope(self.shape, length, self.dtype, self.device)

    def new_cache(self, capacity: int, rope: Rope | None = None, store: Store | None = None) -> FullCache:
        """Return an empty full cache for `capacity` tokens; unless given, its rotations are for that length."""
        if store is None:
            store = new_store(self.operations.kernel, self.shape, capacity, self.dtype, self.device)
        return FullCache(store, rope or self.rope(capacity), capacity)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run `ids` `[tokens]` as the continuation of the tokens in `cache`, and commit them there.

        Returns the hidden rows `[tokens, hidden]` before the final norm, as `logits` takes them.
        """
        cache.begin(len(ids))
        x = self.through(ids, cache)
        cache.commit()
        return x

    @torch.inference_mode()
    def forward_tree(self, ids: Tensor, cache: KVCache, tree: Tree) -> Tensor:
        """Run the last tokens of a tree; those before them are held in `cache`, where all are held afterwards.

        Returns hidden rows as `forward` does.
        """
        cache.begin(len(ids), tree)
        x = self.through(ids, cache)
        cache.hold()
        return x

    def through(self, ids: Tensor, cache: Attends) -> Tensor:
        """Run `forward` without `begin` and `commit`, which the caller does. Returns `[tokens, hidden]`."""
        return self.through_layers(self.embed(ids), cache)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the rows `[tokens, hidden]` of the embedding for `ids` `[tokens]`."""
        return self._embedding(ids)

    def through_layers(self, x: Tensor, cache: Attends) -> Tensor:
        """Run `through` behind the embedding; may overwrite its rows `x` `[tokens, hidden]`."""
        for index, layer in enumerate(self._layers):
            x = self._forward_layer(index, layer, x, cache)
            self._progress = (len(x), index + 1)
        self._progress = (0, 0)
        return x

    @property
    def read_cost(self) -> float:
        """Return the bytes of weights that a step reads from the device's memory; those over a link count more."""
        streamed = getattr(self._layers, "read_cost", None)
        layers = sum(layer.linear_bytes for layer in self._layers) if streamed is None else streamed
        return layers + sum(tensor.nbytes for tensor in self._head.tensors())

    def layers(self) -> Iterator[Layer]:
        """Iterate over the layers; one may be valid only until the next one is taken."""
        return iter(self._layers)

    def with_weights(self, layers: Iterable[Layer], head: Linear | None = None) -> Model:
        """Return a model of the same shape with other layers, and maybe another head; all else is shared."""
        head = self._head if head is None else head
        return Model(self.shape, self.operations, self._embedding, layers, self._norm, head, self.group)

    @property
    def keeps_weights(self) -> bool:
        """Return whether the weights of all layers stay at fixed addresses, as CUDA graphs require."""
        return isinstance(self._layers, list)

    @property
    def is_recordable(self) -> bool:
        """Return whether the layers' operations are native kernel calls alone, on memory that stays where it is."""
        return self.operations.kernel is not None and self.group.size == 1 and self.keeps_weights

    def forward_by_layers(self, ids: Tensor, cache: FullCache, chunk: int) -> Generator[int, None, Tensor]:
        """Run `forward` layer by layer, each in chunks of `chunk` tokens: a layer's offloaded KV is then read once, not
        once a chunk.

        Yields the number of layers done, and returns the hidden rows of the last chunk. If the generator is closed
        early, the cache stays at its committed length.
        """
        with torch.inference_mode():
            cache.begin(len(ids), chunk=chunk)
            parts = [self._embedding(part) for part in ids.split(chunk)]
        for index, layer in enumerate(self._layers):
            with torch.inference_mode():  # not across a yield: the mode is a state of the thread
                for at, part in enumerate(parts):  # each replaces its input, so that the rows are in memory once
                    parts[at] = self._forward_layer(index, layer, part, cache)
            yield index + 1
        cache.commit()
        return parts[-1]

    def _forward_layer(self, index: int, layer: Layer, x: Tensor, cache: Attends) -> Tensor:
        shape, do, epsilon = self.shape, self.operations, self.shape.norm_eps
        heads = layer.qkv(do.norm(x, layer.input_norm, epsilon)).view(len(x), -1, shape.head_dim)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if layer.q_norm is not None:
            q, k = do.norm_heads(q, layer.q_norm, epsilon), do.norm_heads(k, layer.k_norm, epsilon)
        x = layer.o(cache.attend(index, q, k, v).reshape(len(x), -1), onto=x)
        return layer.down(do.gated(layer.gate_up(do.norm(x, layer.mlp_norm, epsilon))), onto=x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` in fp32 of hidden rows `[tokens, hidden]`."""
        return self._head.wide(self.operations.norm(hidden, self._norm, self.shape.norm_eps))


@dataclass(frozen=True, slots=True)
class QuantizedCopy:
    """A model with its weights rounded to `level`; `agreement`: how often both choose the same token on a prompt."""

    model: Model
    level: str
    agreement: float
