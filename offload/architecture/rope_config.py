"""Reads and checks RoPE, and the context that it supports, from a model's config. Imports nothing heavy."""

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedModel
from ..short_repr import short_repr
from ..units import MOST_TOKENS
from .config_checks import ConfigCheck, Limits
from .families import FAMILIES
from .layer_spec import FULL, SLIDING

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")  # of most families
SUPPORTED = f"what runs: {', '.join(FAMILIES)}, with RoPE {', '.join(ROPE_TYPES)}"
_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = {
    "rope_theta": Limits(float, 2, 1e30, 10000),
    "partial_rotary_factor": Limits(float, 0, 1, 1),
    "factor": Limits(float, 1, 2**20, 4, null=True),
    _ORIGINAL: Limits(float, 2, MOST_TOKENS, 8192),
    "low_freq_factor": Limits(float, 1e-3, 1e6, 1),
    "high_freq_factor": Limits(float, 1e-3, 1e6, 4),
    "beta_fast": Limits(float, 1e-3, 1e6, 32, null=True),
    "beta_slow": Limits(float, 1e-3, 1e6, 1, null=True),
    "attention_factor": Limits(float, 1e-3, 1e3, 1, null=True),
    "llama_4_scaling_beta": Limits(float, 0, 1e3, 0.1),
    "mscale": Limits(float, 0, 1e3, 1, null=True),
    "mscale_all_dim": Limits(float, 0, 1e3, 1, null=True),
}
_DIVISOR = Limits(float, 1e-3, 1e6, 1)
_LISTS = ("short_factor", "long_factor")  # of longrope, with a divisor for each frequency
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": _LISTS,
}
_RATIO_TYPES = ("yarn", "longrope")  # types whose factor may be null: the ratio of two contexts
_ASCENDING = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


def rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return the RoPE parameters of a config with defaults, completed as transformers does.

    Older files have `rope_scaling` with `type`, and `rope_theta` outside of it. Raises CheckpointError.
    """
    family = FAMILIES[values["model_type"]]
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if _is_by_kind(rope, values):
        rope = rope.get(FULL) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise check.error("rope_parameters", rope, "RoPE parameters that hold for all layers")
    merged = {"rope_type": rope.get("type", "default"), **rope}
    if isinstance(merged["rope_type"], str):
        merged["rope_type"] = family.rope_types.get(merged["rope_type"], merged["rope_type"])
    for name in ("rope_theta", "partial_rotary_factor"):
        if values.get(name) is not None:
            merged.setdefault(name, values[name])
    merged.setdefault("rope_theta", 10000.0)
    _check_rope(merged, check)
    if merged["rope_type"] in ("llama3", *_RATIO_TYPES):
        if _ORIGINAL in family.defaults:  # a family that has it outside of the parameters
            merged[_ORIGINAL] = values[_ORIGINAL]
        merged.setdefault(_ORIGINAL, values["max_position_embeddings"])
    return merged


def _check_rope(rope: Mapping[str, Any], check: ConfigCheck) -> None:
    """Check the merged RoPE parameters. Raises CheckpointError."""
    kind = rope["rope_type"]
    for name in _REQUIRED.get(kind, ()) if isinstance(kind, str) else ():
        if rope.get(name) is None and not (name == "factor" and kind in _RATIO_TYPES and name in rope):
            raise CheckpointError(f"{check.place}: RoPE {kind} without {name}", check.hint)
    for name, value in rope.items():
        if name in _NUMBERS:
            check.number(name, value, _NUMBERS[name])
        elif name in _LISTS and not (isinstance(value, list) and value and all(map(_DIVISOR.allow, value))):
            raise check.error(name, value, f"a list with {_DIVISOR} for every frequency")
    if not isinstance(rope.get("truncate", True), bool):
        raise check.error("truncate", rope["truncate"], "true or false")
    for lower, higher in _ASCENDING:
        first, second = rope.get(lower), rope.get(higher)
        if first is not None and second is not None and first >= second:
            raise check.error(lower, first, f"below {higher}, which is {short_repr(second)}")


def _is_by_kind(rope: Any, values: Mapping[str, Any]) -> bool:
    """Return whether RoPE parameters are those of each kind of layer."""
    has_windows = FAMILIES[values["model_type"]].has_layer_windows
    return has_windows and isinstance(rope, Mapping) and FULL in rope


def sliding_rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any] | None:
    """Return the RoPE parameters of the layers with a window; None if they are those of the others."""
    family, rope = FAMILIES[values["model_type"]], values.get("rope_parameters") or {}
    if not family.has_layer_windows:
        return None
    if _is_by_kind(rope, values):
        if not isinstance(rope.get(SLIDING), Mapping):
            raise check.error("rope_parameters", rope, f"RoPE parameters with {SLIDING}")
        rope = {"rope_type": "default", "rope_theta": 10000.0, **rope[SLIDING]}
    elif family.sliding_rope:
        rope = family.sliding_rope(values)
    else:
        return None
    _check_rope(rope, check)
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("RoPE in layers with a window that is scaled, or on a part of each head", SUPPORTED)
    return rope


def positions_of(rope: Mapping[str, Any], positions: int) -> int:
    """Return how many positions a model supports, from its RoPE parameters and `max_position_embeddings`.

    Configs give that number after scaling for llama3 and longrope, before scaling for others.
    """
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind == "yarn":
        return max(positions, int((rope.get(_ORIGINAL) or positions) * factor))
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
    if not (parameters := config.get(name)):
        return None
    limits = [parameters.get(each) for each in ("chunk_size", _ORIGINAL)] if isinstance(parameters, Mapping) else []
    found = [each for each in limits if each is not None]
    if not found or not all(type(each) is int and 0 < each <= MOST_TOKENS for each in found):
        raise check.error(name, parameters, "parameters with a chunk_size")
    return min(found)
