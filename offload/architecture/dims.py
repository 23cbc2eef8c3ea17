"""Counts of parameters and bytes that follow from a decoder's dimensions alone. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dimensions:
    """What every description of a decoder can say about its size. Numbers of parameters leave out biases and norms,
    which are under 0.1 % of the whole."""

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
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def outer_parameters(self) -> int:
        """Parameters of the embeddings and the output head, which may be the same."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Parameters of the decoder."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def read_parameters(self) -> int:
        """Parameters that a step reads: all but the embeddings, of which it looks up single rows."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values for so many tokens."""
        return self.layers * self.layer_kv_bytes(tokens, itemsize)

    def layer_kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values of one layer for so many tokens."""
        return 2 * self.kv_heads * self.head_dim * tokens * itemsize
