"""Counts a decoder's parameters, and the bytes of its weights, from its dimensions. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .layer_spec import Experts, Heads, LinearAttention


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


class Parameters:
    """The weights of a decoder: a part of `Dimensions`, whose attributes it reads.

    Counts exclude biases and norms, which are under 0.1 % of the total.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    mlp_matrices: int
    wide_layers: int
    layer_input: int
    experts: Experts | None
    linear: LinearAttention | None
    gates_heads: bool
    kinds: list[tuple[int, Heads, int]]

    @property
    def dense_layers(self) -> int:
        """Return how many layers have one MLP and no experts."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def mlp_widths(self) -> list[int]:
        """Return the intermediate sizes that there are: of an MLP, of an expert, or of both."""
        widths = [self.intermediate] * (self.dense_layers > 0) + [2 * self.intermediate] * (self.wide_layers > 0)
        experts = [self.experts.width, self.experts.shared or self.experts.width] if self.experts else []
        return widths + list(dict.fromkeys(experts))

    def linears(self) -> Iterator[tuple[int, int]]:
        """Yield the inputs and outputs of all layers' linears, those of equal inputs together; without small ones.

        Those are routers, and the rates and decays of linear attention.
        """
        yield from self.dense_linears()
        yield from self.expert_linears()

    def dense_linears(self) -> Iterator[tuple[int, int]]:
        """Yield the inputs and outputs of the linears but the routed experts', as `linears` does."""
        for count, heads, keys_and_values in self.kinds:
            queries = self.heads * heads.head_dim
            yield self.hidden, count * queries * (1 + self.gates_heads) + keys_and_values
            yield queries, count * self.hidden
        if linear := self.linear:
            yield self.hidden, linear.layers * (linear.width + linear.values)
            yield linear.values, linear.layers * self.hidden
        if self.layer_input:
            yield self.hidden, self.layers * self.layer_input
            yield self.layer_input, self.layers * self.hidden
        yield from self._mlps(self.intermediate, self.dense_layers - self.wide_layers)
        yield from self._mlps(2 * self.intermediate, self.wide_layers)
        if self.experts and self.experts.shared:
            yield from self._mlps(self.experts.shared, self.experts.layers)

    def expert_linears(self) -> Iterator[tuple[int, int]]:
        """Yield the inputs and outputs of all experts' linears, without shared experts, as `linears` does."""
        if self.experts:
            yield from self._mlps(self.experts.width, self.experts.layers * self.experts.count)

    def _mlps(self, width: int, count: int) -> Iterator[tuple[int, int]]:
        yield self.hidden, count * (self.mlp_matrices - 1) * width
        yield width, count * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer; their mean, rounded up, if only some layers are sparse."""
        return -(-self._all_layers() // self.layers)

    def _all_layers(self) -> int:
        choices = self.experts.count + (self.experts.shared > 0) if self.experts else 0  # and the shared one's gate
        small = self.experts.layers * choices * self.hidden if self.experts else 0
        if self.linear:
            small += self.linear.layers * 2 * self.linear.value_heads * self.hidden
        return small + sum(inputs * outputs for inputs, outputs in self.linears())

    def _read_by(self, tokens: float) -> float:
        """Return the expected number of the layers' parameters that `tokens` tokens read together."""
        if self.experts is None:
            return self._all_layers()
        unread = self.experts.count - self.experts.distinct(tokens)
        return self._all_layers() - unread * self.experts.layers * self.expert_parameters

    @property
    def expert_parameters(self) -> int:
        """Return the number of parameters of one expert; 0 without experts."""
        return self.mlp_matrices * self.hidden * self.experts.width if self.experts else 0

    @property
    def outer_parameters(self) -> int:
        """Return the number of parameters of the embeddings and the output head; tied ones count once."""
        of_layers = (self.vocab + self.hidden) * self.layers * self.layer_input  # the layers' own embeddings
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + of_layers

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the decoder."""
        return self._all_layers() + self.outer_parameters

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
        return int(self._layer_bits(bits, self.experts.count) / 8 / self.layers)

    def _layer_bits(self, bits: WeightBits, read: float) -> float:
        """Return the bits of the weights of all layers, with `read` experts of each sparse one."""
        each = self.experts.layers * self.expert_parameters
        rest = self._all_layers() - self.experts.count * each
        return rest * bits.layers + read * each * bits.of_experts

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
            layers = int(self._layer_bits(bits, self.experts.distinct(tokens)) / 8)
        return layers + int(self._read_outside * bits.outer / 8)
