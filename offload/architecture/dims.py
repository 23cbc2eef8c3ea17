"""Computes counts of parameters and bytes from a decoder's dimensions. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class WeightBits:
    """Average bits of a weight in memory, scales included: of the layers, and of the embeddings and output head."""

    layers: float
    outer: float

    @staticmethod
    def of_dtype(itemsize: int) -> WeightBits:
        """Return the bits of weights that are not quantised, of `itemsize` bytes."""
        return WeightBits(8 * itemsize, 8 * itemsize)

    def is_quantized(self, itemsize: int) -> bool:
        """Return whether any weights of a model that computes with `itemsize` bytes are quantised."""
        return min(self.layers, self.outer) < 8 * itemsize


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a decoder. Parameter counts exclude biases and norms, which are under 0.1 % of the total."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool

    @property
    def group(self) -> int:
        """Return how many query heads share one KV head."""
        return self.heads // self.kv_heads

    def share(self, ranks: int) -> Dimensions:
        """Return the dimensions of the largest share of `ranks` devices, as parallel/shard.py divides a model.

        Each has all of the vocabulary here. Where there are fewer KV heads than ranks, several have the same one.
        """
        kv_heads = -(-self.kv_heads // ranks)
        heads = kv_heads * self.group if self.kv_heads >= ranks else -(-self.heads // ranks)
        return replace(self, heads=heads, kv_heads=kv_heads, intermediate=-(-self.intermediate // ranks))

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def outer_parameters(self) -> int:
        """Return the number of parameters of the embeddings and the output head; tied ones count once."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the decoder."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def read_parameters(self) -> int:
        """Return the number of parameters that a decode step reads; of the embeddings it reads one row."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    def layer_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of the weights of one layer."""
        return int(self.layer_parameters * bits.layers / 8)

    def outer_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of the embeddings and the output head."""
        return int(self.outer_parameters * bits.outer / 8)

    def read_bytes(self, bits: WeightBits) -> int:
        """Return the bytes of weights that a decode step reads."""
        return self.layers * self.layer_bytes(bits) + int(self.vocab * self.hidden * bits.outer / 8)

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of keys and values of all layers for `tokens` tokens."""
        return self.layers * self.layer_kv_bytes(tokens, itemsize)

    def layer_kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of keys and values of one layer for `tokens` tokens."""
        return 2 * self.kv_heads * self.head_dim * tokens * itemsize
