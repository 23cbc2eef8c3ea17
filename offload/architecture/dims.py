"""The dimensions of a decoder, and the bytes of its weights, keys, values and states. Imports nothing heavy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from .layer_spec import FULL, LINEAR, SLIDING, Experts, Heads, Latent, LayerSpec, LinearAttention

WINDOW_SLACK = 512  # tokens that layers with a window keep beside it, for rollbacks


@dataclass(frozen=True, slots=True)
class WeightBits:
    """Average bits of a weight in memory, scales included.

    Attributes:
        layers: of the layers; without their experts, where those have others.
        outer: of the embeddings and the output head.
        experts: of the experts; None for as many as the layers.
    """

    layers: float
    outer: float
    experts: float | None = None

    @staticmethod
    def of_dtype(itemsize: int) -> WeightBits:
        """Return the bits of weights that are not quantised, of `itemsize` bytes."""
        return WeightBits(8 * itemsize, 8 * itemsize)

    def is_quantized(self, itemsize: int) -> bool:
        """Return whether any weights of a model that computes with `itemsize` bytes are quantised."""
        return min(self.layers, self.outer, self.of_experts) < 8 * itemsize

    @property
    def of_experts(self) -> float:
        return self.layers if self.experts is None else self.experts


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a decoder.

    Counts of parameters leave out biases and norms, which are under 0.1 % of the total.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    specs: tuple[LayerSpec, ...] = field(default=(LayerSpec(),), kw_only=True)  # of the layers, which repeat them
    sliding_heads: Heads | None = field(default=None, kw_only=True)  # of layers with a window, if they are others
    window_slack: int = field(default=WINDOW_SLACK, kw_only=True)  # tokens that such layers keep beside the window
    layer_input: int = field(default=0, kw_only=True)  # the width of the embeddings that each layer has; 0: none
    experts: Experts | None = field(default=None, kw_only=True)  # of sparse layers; the others' width is `intermediate`
    linear: LinearAttention | None = field(default=None, kw_only=True)  # of the layers that have it
    latent: Latent | None = field(default=None, kw_only=True)  # of all layers

    def spec(self, layer: int) -> LayerSpec:
        """Return what layer number `layer` computes."""
        return self.specs[layer % len(self.specs)]

    @cached_property
    def every_spec(self) -> list[LayerSpec]:
        """Return the specs of all layers, in order."""
        return [self.spec(layer) for layer in range(self.layers)]

    def heads_of(self, spec: LayerSpec) -> Heads:
        return self.sliding_heads if spec.window and self.sliding_heads else Heads(self.kv_heads, self.head_dim)

    def _count(self, kind: str, borrows: bool) -> int:
        return sum(spec.kind == kind and spec.borrows == borrows for spec in self.every_spec)

    def of_kind(self, kind: str) -> Self:
        """Return the part of the model with the layers of a kind that have keys and values of their own."""
        specs = tuple(spec for spec in self.every_spec if spec.kind == kind and not spec.borrows)
        if len(specs) == self.layers:
            return self
        heads = self.heads_of(specs[0]) if specs else Heads(self.kv_heads, self.head_dim)
        own: dict[str, Any] = {"kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        return replace(self, specs=specs, layers=len(specs), sliding_heads=None, linear=None, **own)

    @property
    def group(self) -> int:
        """Return how many query heads share one KV head."""
        return self.heads // self.kv_heads

    @property
    def unshared(self) -> str:
        """Return why ranks cannot share the model; "" if they can."""
        if self.linear is not None:
            return "some of its layers have linear attention"
        if self.latent is not None:
            return "its attention is latent"
        if self.experts and self.experts.shared:
            return "all tokens share an expert"
        return "its layers have heads of two kinds" if self.sliding_heads else ""

    @cached_property
    def kv_layers(self) -> int:
        """Return how many layers have keys and values of all tokens."""
        return self._count(FULL, borrows=False)

    @cached_property
    def linear_layers(self) -> int:
        """Return how many layers have linear attention."""
        return self._count(LINEAR, borrows=False)

    @cached_property
    def ring_layers(self) -> int:
        """Return how many layers have keys and values of a window."""
        return self._count(SLIDING, borrows=False)

    @cached_property
    def borrowing(self) -> tuple[int, int]:
        """Return how many layers attend to keys and values of another one: to those of all tokens, and to a window."""
        return self._count(FULL, borrows=True), self._count(SLIDING, borrows=True)

    @property
    def sliding_layers(self) -> int:
        """Return how many layers attend to a window."""
        return self.ring_layers + self.borrowing[1]

    @cached_property
    def window_room(self) -> int:
        """Return how many tokens' keys and values the layers with a window keep."""
        return max(spec.window for spec in self.every_spec) + self.window_slack if self.sliding_layers else 0

    @property
    def runs_by_layers(self) -> bool:
        """Return whether a prompt can be run layer by layer: not where layers attend to another one's windows.

        Nor where each has embeddings of its own, which take as much memory as the keys of some layers.
        """
        return not any(self.borrowing) and not self.layer_input

    @property
    def kv_reads(self) -> tuple[float, float]:
        """Return the mean number of times that a pass reads the KV of all tokens, and the KV of windows."""
        counts = zip((self.kv_layers, self.ring_layers), self.borrowing, strict=True)
        full, sliding = (1 + borrowing / max(count, 1) for count, borrowing in counts)
        return full, sliding

    @cached_property
    def full_attention(self) -> Self:
        """Return the part of the model whose layers attend to all tokens: a KV cache grows for these alone."""
        return self.of_kind(FULL)

    def share(self, ranks: int) -> Dimensions:
        """Return the dimensions of the largest share of `ranks` devices, as parallel/shard.py divides a model.

        Each has all of the vocabulary here. Where there are fewer KV heads than ranks, several have the same one.
        """
        kv_heads = -(-self.kv_heads // ranks)
        heads = kv_heads * self.group if self.kv_heads >= ranks else -(-self.heads // ranks)
        experts = self.experts and replace(self.experts, width=-(-self.experts.width // ranks))
        intermediate = -(-self.intermediate // ranks)
        return replace(self, heads=heads, kv_heads=kv_heads, intermediate=intermediate, experts=experts)

    def attention_products(self, tokens: int) -> int:
        """Return the numbers of keys that a query row of all layers is multiplied with, of `tokens` tokens."""
        lengths = {FULL: tokens, SLIDING: min(tokens, self.window_room), LINEAR: 0}
        return sum(lengths[spec.kind] * self.heads * self.heads_of(spec).head_dim for spec in self.every_spec)

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of keys and values of all layers for `tokens` tokens."""
        whole = self.kv_layers * self.layer_kv_bytes(tokens, itemsize)
        return whole + self.window_bytes(tokens, itemsize)

    def window_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of keys and values of `tokens` tokens that the layers with a window keep."""
        return self.ring_layers * self._ring_layer_bytes(min(tokens, self.window_room), itemsize)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of the states of the layers with linear attention, as `LinearAttention.state_bytes`."""
        return self.linear.state_bytes(itemsize) if self.linear else 0

    @property
    def moved_state_bytes(self) -> int:
        """Return the bytes of states that a pass reads and writes."""
        return 2 * 4 * self.linear.layers * self.linear.state_numbers if self.linear else 0

    def fixed_bytes(self, tokens: int, itemsize: int, nodes: int = 0, chunk: int = 0) -> int:
        """Return the bytes of rings, as `ring_bytes`, and of states: of what does not grow with every token."""
        return self.ring_bytes(tokens, itemsize, nodes, chunk) + self.state_bytes(itemsize)

    def ring_bytes(self, tokens: int, itemsize: int, nodes: int = 0, chunk: int = 0) -> int:
        """Return the bytes of the rings of the layers with a window for `tokens` tokens, whatever is in them.

        `nodes`: of the largest tree in flight. Where other layers attend to a ring, it has the tokens of a
        prefill `chunk`, too.
        """
        inflight = max(nodes, chunk if self.borrowing[1] else 0)
        room = min(self.window_room + max(inflight - WINDOW_SLACK, 0), tokens + nodes)
        return self.ring_layers * self._ring_layer_bytes(room, itemsize)

    def _ring_layer_bytes(self, tokens: int, itemsize: int) -> int:
        heads = self.sliding_heads or Heads(self.kv_heads, self.head_dim)
        return 2 * heads.kv_heads * heads.head_dim * tokens * itemsize

    def layer_kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of keys and values of one layer for `tokens` tokens."""
        return 2 * self.kv_heads * self.head_dim * tokens * itemsize

    @property
    def mlp_widths(self) -> list[int]:
        """Return the intermediate sizes that there are: of MLPs, of experts, or of both."""
        experts = [self.experts.width, self.experts.shared or self.experts.width] if self.experts else []
        dense = [spec.width_factor * self.intermediate for spec in self.every_spec if not spec.is_sparse]
        return list(dict.fromkeys(dense + experts))

    def dense_linears(self) -> Iterator[tuple[int, int]]:
        """Yield the inputs and outputs of all layers' linears without routed experts, those of equal inputs together.

        Small ones are left out: routers, and the rates and decays of linear attention.
        """
        for spec, count in Counter(self.every_spec).items():
            for inputs, outputs in self._linears(spec):
                yield inputs, count * outputs

    def _linears(self, spec: LayerSpec) -> Iterator[tuple[int, int]]:
        """Yield the inputs and outputs of one layer's linears, as `dense_linears` does."""
        heads = self.heads_of(spec)
        queries, keys = self.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        if spec.is_linear and self.linear:
            yield self.hidden, self.linear.width + self.linear.values
            yield self.linear.values, self.hidden
        elif sizes := self.latent:
            queries, rank = self.heads * (sizes.plain + sizes.rotated), sizes.query_rank
            yield self.hidden, (rank or queries) + sizes.head_dim
            yield from [(rank, queries)] if rank else []
            yield sizes.rank, self.heads * (sizes.plain + sizes.value_dim)
            yield self.heads * sizes.value_dim, self.hidden
        else:
            yield self.hidden, queries * (1 + spec.gates_heads) + keys * (len(spec.projections) - 1)
            yield queries, self.hidden
        if self.layer_input:
            yield self.hidden, self.layer_input
            yield self.layer_input, self.hidden
        width = spec.width_factor * self.intermediate
        if spec.is_sparse and self.experts:
            width = self.experts.shared
        if width:
            yield self.hidden, (1 + spec.is_gated) * width
            yield width, self.hidden

    def expert_linears(self) -> Iterator[tuple[int, int]]:
        """Yield the inputs and outputs of all routed experts' linears, as `dense_linears` does."""
        if experts := self.experts:
            count = experts.layers * experts.count
            yield self.hidden, count * (1 + self.specs[0].is_gated) * experts.width
            yield experts.width, count * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer; their mean, rounded up, if only some layers are sparse."""
        return -(-self._all_layers // self.layers)

    @cached_property
    def _all_layers(self) -> int:
        """Return the number of parameters of all layers."""
        choices = self.experts.count + (self.experts.shared > 0) if self.experts else 0  # and the shared one's gate
        small = self.experts.layers * choices * self.hidden if self.experts else 0
        if self.linear:
            small += self.linear.layers * 2 * self.linear.value_heads * self.hidden
        linears = (*self.dense_linears(), *self.expert_linears())
        return small + sum(inputs * outputs for inputs, outputs in linears)

    def _read_by(self, tokens: float) -> float:
        """Return the expected number of the layers' parameters that `tokens` tokens read together."""
        if self.experts is None:
            return self._all_layers
        unread = self.experts.count - self.experts.distinct(tokens)
        return self._all_layers - unread * self.experts.layers * self.expert_parameters

    @property
    def expert_parameters(self) -> int:
        """Return the number of parameters of one expert; 0 without experts."""
        return (2 + self.specs[0].is_gated) * self.hidden * self.experts.width if self.experts else 0

    @property
    def outer_parameters(self) -> int:
        """Return the number of parameters of the embeddings and the output head; tied ones count once."""
        of_layers = (self.vocab + self.hidden) * self.layers * self.layer_input  # the layers' own embeddings
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + of_layers

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the decoder."""
        return self._all_layers + self.outer_parameters

    @property
    def active_layer_parameters(self) -> int:
        """Return the number of parameters of all layers that a token is multiplied with."""
        return round(self._read_by(1))

    @property
    def read_parameters(self) -> int:
        """Return the number of parameters that a decode step reads; of the embeddings it reads one row."""
        return self.active_layer_parameters + self._read_outside

    @property
    def _read_outside(self) -> int:
        """Return the number of parameters outside of the layers that a pass reads whole."""
        return self.vocab * self.hidden + self.hidden * self.layers * self.layer_input

    def layer_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of the weights of one layer; their mean, if layers differ."""
        if self.experts is None or bits.experts is None:
            return int(self.layer_parameters * bits.layers / 8)
        return int(self._layer_bits(bits, self.experts, self.experts.count) / 8 / self.layers)

    def _layer_bits(self, bits: WeightBits, experts: Experts, read: float) -> float:
        """Return the bits of the weights of all layers, with `read` experts of each sparse one."""
        expert_parameters = experts.layers * self.expert_parameters
        others = self._all_layers - experts.count * expert_parameters
        return others * bits.layers + read * expert_parameters * bits.of_experts

    def expert_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of all experts of a sparse layer, without its router; 0 without experts."""
        if self.experts is None:
            return 0
        return int(self.experts.count * self.expert_parameters * bits.of_experts / 8)

    def outer_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of the embeddings and the output head."""
        return int(self.outer_parameters * bits.outer / 8)

    def host_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of those that lie in host memory wherever the model runs: the layers' own embeddings."""
        return int(self.vocab * self.layers * self.layer_input * bits.outer / 8)

    def read_bytes(self, bits: WeightBits, tokens: float = 1) -> int:
        """Return the bytes of weights that a pass of `tokens` tokens reads: of experts, as many as are expected."""
        layers = self.layers * self.layer_bytes(bits)
        if self.experts:
            layers = int(self._layer_bits(bits, self.experts, self.experts.distinct(tokens)) / 8)
        return layers + int(self._read_outside * bits.outer / 8)
