"""Reads RoPE, and the context that it supports, from a model's config. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModel
from ..short_repr import short_repr
from ..units import MOST_TOKENS
from .config_checks import ConfigCheck
from .families import FAMILIES

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")  # of most families
SUPPORTED = f"what runs: {', '.join(FAMILIES)}, with RoPE {', '.join(ROPE_TYPES)}"
_STORES_ORIGINAL = ("llama3", "yarn", "longrope")  # RoPE types with `original_max_position_embeddings`


def rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return the RoPE parameters, completed as transformers does."""
    rope = check.rope_of(values)
    rope.setdefault("rope_theta", 10000.0)
    if rope["rope_type"] in _STORES_ORIGINAL:
        name = "original_max_position_embeddings"
        if name in FAMILIES[values["model_type"]].defaults:  # a family that has it outside of the parameters
            rope[name] = values[name]
        rope.setdefault(name, values["max_position_embeddings"])
    return rope


def sliding_rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any] | None:
    """Return the RoPE parameters of the layers with a window; None if they are those of the others."""
    rope = check.sliding_rope_of(values)
    if rope is not None and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("RoPE on a part of each head in layers with a window is not supported", SUPPORTED)
    if rope is not None and rope["rope_type"] != "default":
        raise UnsupportedModel(
            f"the RoPE type {short_repr(rope['rope_type'])} in layers with a window is not supported", SUPPORTED
        )
    return rope


def positions_of(rope: Mapping[str, Any], positions: int) -> int:
    """Return how many positions a model supports, from its RoPE parameters and `max_position_embeddings`.

    Configs give that number after scaling for llama3 and longrope, before scaling for others.
    """
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind == "yarn":
        return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
    return int(positions * factor) if kind in ("linear", "dynamic") else positions


def context_of(values: Mapping[str, Any], rope: Mapping[str, Any], window: int | None, dual_chunk: int | None) -> int:
    """Return how many tokens a model supports with full attention."""
    positions = values["max_position_embeddings"]
    if not FAMILIES[values["model_type"]].counts_scaled_positions:
        positions = positions_of(rope, positions)
    return min(positions, window or positions, dual_chunk or positions)


def dual_chunk_tokens(config: Mapping[str, Any], check: ConfigCheck) -> int | None:
    """Return how many tokens a model with dual chunk attention attends to as full attention does; None without it.

    Beyond them, Qwen2.5-1M maps positions back to those that it was trained for (arXiv 2402.17463 and 2501.15383).
    Raises CheckpointError for parameters that are wrong.
    """
    name = "dual_chunk_attention_config"
    parameters = config.get(name)
    if not parameters:
        return None
    names = ("chunk_size", "original_max_position_embeddings")
    limits = [parameters.get(each) for each in names] if isinstance(parameters, Mapping) else []
    found = [each for each in limits if each is not None]
    if not found or not all(type(each) is int and 0 < each <= MOST_TOKENS for each in found):
        raise check.error(name, parameters, "parameters with a chunk_size")
    return min(found)
