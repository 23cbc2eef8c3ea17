"""The shape of a decoder: its dimensions, and the features of its layers. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .dims import Dimensions
from .families import FAMILIES, Family
from .layer_spec import FULL, LINEAR, SLIDING


@dataclass(frozen=True)
class ModelShape(Dimensions):
    """The dimensions and features of a decoder.

    `context` is the longest sequence, in tokens, that the model supports with full attention:
    `max_position_embeddings` times its RoPE scaling, or its sliding window if that is shorter, or as far as dual chunk
    attention is full attention.
    """

    family: str
    norm_eps: float
    context: int
    sliding_window: int | None
    eos_ids: tuple[int, ...]
    rope: Mapping[str, Any] = field(hash=False)  # transformers' `rope_parameters`
    max_positions: int  # `max_position_embeddings`
    rope_divisors: tuple[float, ...] | None = None  # one per frequency, from the tensor of a GGUF file
    embedding_scale: float = 1.0  # a factor of the embedding's rows
    logit_scale: float = 1.0  # a factor of the logits
    logit_cap: float = 0.0  # logits are `logit_cap * tanh(logit / logit_cap)`; 0: they are as they are
    sliding_rope: Mapping[str, Any] | None = field(default=None, hash=False)  # of layers with a window, if another
    wide_norms: bool = False  # whether the norms' weights are kept in fp32
    norm_offset: float = 0.0  # is added to the norms' weights of a checkpoint
    rounds_embedding_scale: bool = False  # whether that factor is rounded to the model's dtype
    rotates_neighbours: bool = False  # whether RoPE rotates pairs of neighbours, and not of halves, in the checkpoint

    @cached_property
    def sliding_attention(self) -> ModelShape:
        """Return the part of the model whose layers attend to a window, and have keys and values of it."""
        return replace(self.of_kind(SLIDING), rope=self.sliding_rope or self.rope, sliding_rope=None)

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Return for each layer its kind, as `LayerSpec.kind`, and its number among the layers of that kind.

        That of a layer that borrows is the one of the layer whose keys and values it attends to.
        """
        numbers, places = dict.fromkeys((FULL, SLIDING, LINEAR), -1), []
        for spec in self.every_spec:
            numbers[spec.kind] += not spec.borrows
            places.append((spec.kind, numbers[spec.kind]))
        return places

    @property
    def is_uniform(self) -> bool:
        """Return whether every layer attends to all tokens, with scores that are not capped."""
        return not (self.sliding_layers or self.linear_layers or self.caps_scores)

    @property
    def caps_scores(self) -> bool:
        """Return whether attention scores of any layer are capped, which torch alone computes."""
        return any(spec.soft_cap for spec in self.specs)

    @property
    def has_sinks(self) -> bool:
        """Return whether any layer has attention sinks, which need the log-sum-exp of attention."""
        return any(spec.has_sinks for spec in self.specs)

    @property
    def is_native(self) -> bool:
        """Return whether the native kernel has all operations of the layers; torch runs what it lacks."""
        return self.takes_rows_alone and all(spec.is_native for spec in self.specs)

    @property
    def family_spec(self) -> Family:
        """Return how the models of the family are read."""
        return FAMILIES[self.family]

    @property
    def rotary_dim(self) -> int:
        """Return how many dimensions of a head RoPE rotates, the first ones; proportional RoPE has angles of 0."""
        if self.latent is not None:
            return self.latent.rotated
        if self.rope_type == "proportional":
            return self.head_dim
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))

    @property
    def query_scaling(self) -> tuple[float, float] | None:
        """Return (beta, tokens) if queries at position p are multiplied with 1 + beta * ln(1 + p // tokens)."""
        if not self.family_spec.scales_queries or "llama_4_scaling_beta" not in self.rope:
            return None
        return self.rope["llama_4_scaling_beta"], self.rope.get("original_max_position_embeddings", self.max_positions)

    @property
    def takes_rows_alone(self) -> bool:
        """Return whether layers take nothing that follows from tokens and positions beside the hidden rows."""
        return self.query_scaling is None and not self.layer_input

    @property
    def rope_type(self) -> str:
        """Return the type of the RoPE scaling; "default" for none."""
        return self.rope["rope_type"]

    @property
    def rope_depends_on_length(self) -> bool:
        """Return whether the angles at a position depend on the longest length of the sequence."""
        return self.rope_type in ("dynamic", "longrope")
