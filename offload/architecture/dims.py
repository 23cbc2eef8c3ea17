"""The dimensions of a decoder, and the bytes of its keys, values and states. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .layer_spec import Experts, Heads, LinearAttention
from .parameters import Parameters

WINDOW_SLACK = 512  # tokens that layers with a window keep beside it, for rollbacks


@dataclass(frozen=True)
class Dimensions(Parameters):
    """The dimensions of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    mlp_matrices: int = field(default=3, kw_only=True)  # gate, up and down; 2 without a gate
    sliding_layers: int = field(default=0, kw_only=True)  # layers that attend to a window
    window_room: int = field(default=0, kw_only=True)  # tokens whose keys and values they keep
    sliding_heads: Heads | None = field(default=None, kw_only=True)  # theirs, if they are others
    # Layers that attend to keys and values of another layer: of those that attend to all tokens, and to a window.
    borrowing: tuple[int, int] = field(default=(0, 0), kw_only=True)
    keys_are_values: bool = field(default=False, kw_only=True)  # whether layers that attend to all tokens have no V
    wide_layers: int = field(default=0, kw_only=True)  # layers whose MLP is twice as wide as `intermediate`
    layer_input: int = field(default=0, kw_only=True)  # the width of the embeddings that each layer has; 0: none
    experts: Experts | None = field(default=None, kw_only=True)  # of sparse layers; the others' width is `intermediate`
    linear: LinearAttention | None = field(default=None, kw_only=True)  # of the layers that have it
    gates_heads: bool = field(default=False, kw_only=True)  # whether q_proj has as many rows more, for gates

    @property
    def group(self) -> int:
        """Return how many query heads share one KV head."""
        return self.heads // self.kv_heads

    @property
    def unshared(self) -> str:
        """Return why ranks cannot share the model; "" if they can."""
        if self.linear is not None:
            return "some of its layers have linear attention"
        return "its layers have heads of two kinds" if self.sliding_heads else ""

    @property
    def kv_layers(self) -> int:
        """Return how many layers have keys and values of all tokens."""
        return self.layers - self.sliding_layers - self.linear_layers - self.borrowing[0]

    @property
    def linear_layers(self) -> int:
        """Return how many layers have linear attention."""
        return self.linear.layers if self.linear else 0

    @property
    def ring_layers(self) -> int:
        """Return how many layers have keys and values of a window."""
        return self.sliding_layers - self.borrowing[1]

    @property
    def runs_by_layers(self) -> bool:
        """Return whether a prompt can be run layer by layer: not where layers attend to another one's windows.

        Nor where each has embeddings of its own, which take as much memory as the keys of some layers.
        """
        return not any(self.borrowing) and not self.layer_input

    @property
    def kv_reads(self) -> tuple[float, float]:
        """Return how often a pass reads keys and values of all tokens, and those of windows, in the mean."""
        counts = zip((self.kv_layers, self.ring_layers), self.borrowing, strict=True)
        full, sliding = (1 + borrowing / max(count, 1) for count, borrowing in counts)
        return full, sliding

    @property
    def growing(self) -> Dimensions:
        """Return the dimensions with these layers alone, for bytes of what grows with the sequence."""
        if self.kv_layers == self.layers:
            return self
        nothing: dict[str, Any] = {"sliding_layers": 0, "sliding_heads": None, "borrowing": (0, 0), "linear": None}
        return replace(self, layers=self.kv_layers, **nothing)

    @property
    def kinds(self) -> list[tuple[int, Heads, int]]:
        """Return for both kinds of layers with KV how many there are, their heads, and outputs of their k and v."""
        own = Heads(self.kv_heads, self.head_dim)
        sliding = self.sliding_heads or own
        counts = (self.layers - self.sliding_layers - self.linear_layers, self.sliding_layers)
        found = []
        for count, heads, borrowing, parts in zip(
            counts, (own, sliding), self.borrowing, (1 if self.keys_are_values else 2, 2), strict=True
        ):
            found.append((count, heads, (count - borrowing) * parts * heads.kv_heads * heads.head_dim))
        return found

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
        lengths = (tokens, min(tokens, self.window_room))
        pairs = zip(self.kinds, lengths, strict=True)
        return sum(count * length * self.heads * heads.head_dim for (count, heads, _), length in pairs)

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

        `nodes` are those of the largest tree in flight. Where other layers attend to a ring, it has the tokens of a
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
