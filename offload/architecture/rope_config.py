"""Reads and checks RoPE, and the context that it supports, from a model's config. Imports nothing heavy."""

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedModel
from ..short_repr import short_repr
from .config_checks import BASE, FACTOR, TOKENS, ConfigCheck, Limits
from .families import FAMILIES
from .layer_spec import FULL, SLIDING

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")  # of most families
SUPPORTED = f"what runs: {', '.join(FAMILIES)}, with RoPE {', '.join(ROPE_TYPES)}"
_ORIGINAL, _DUAL_CHUNK = "original_max_position_embeddings", "dual_chunk_attention_config"
_LIMITS = {
    BASE: "rope_theta",
    Limits(float, 0, 1): "partial_rotary_factor",
    Limits(float, 1, 2**20): "factor",
    Limits(float, 2, TOKENS.most): _ORIGINAL,
    FACTOR: "low_freq_factor high_freq_factor beta_fast beta_slow attention_factor",
    Limits(float, 0, 1e3): "llama_4_scaling_beta mscale mscale_all_dim",
}
_NULLABLE = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
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
    check.numbers(rope, _LIMITS, _NULLABLE)
    for name in (name for name in _LISTS if name in rope):
        if not (isinstance(rope[name], list) and rope[name] and all(map(FACTOR.allow, rope[name]))):
            raise check.error(name, rope[name], f"a list with {FACTOR} for every frequency")
    if not isinstance(rope.get("truncate", True), bool):
        raise check.error("truncate", rope["truncate"], "true or false")
    for lower, higher in _ASCENDING:
        first, second = rope.get(lower), rope.get(higher)
        if first is not None and second is not None and first >= second:
            raise check.error(lower, first, f"below {higher}, which is {short_repr(second)}")


def _is_by_kind(rope: Any, values: Mapping[str, Any]) -> bool:
    """Return whether RoPE parameters are given apart for each kind of layer."""
    return FAMILIES[values["model_type"]].has_layer_windows and isinstance(rope, Mapping) and FULL in rope


def sliding_rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any] | None:
    """Return the RoPE parameters of the layers with a window; None if all layers have the same ones."""
    family, rope = FAMILIES[values["model_type"]], values.get("rope_parameters") or {}
    if _is_by_kind(rope, values):
        if not isinstance(rope.get(SLIDING), Mapping):
            raise check.error("rope_parameters", rope, f"RoPE parameters with {SLIDING}")
        rope = {"rope_type": "default", "rope_theta": 10000.0, **rope[SLIDING]}
    elif family.has_layer_windows and family.sliding_rope:
        rope = family.sliding_rope(values)
    else:
        return None
    _check_rope(rope, check)
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("RoPE in layers with a window that is scaled, or on a part of each head", SUPPORTED)
    return rope


def context_of(values: Mapping[str, Any], rope: Mapping[str, Any], window: int | None, check: ConfigCheck) -> int:
    """Return how many tokens a model supports with full attention. Raises CheckpointError.

    Configs give `max_position_embeddings` after scaling for llama3 and longrope, before scaling for other types. Dual
    chunk attention (Qwen2.5-1M, arXiv 2501.15383) is full attention up to the length that it was trained for.
    """
    positions, factor = values["max_position_embeddings"], rope.get("factor") or 1.0
    if not FAMILIES[values["model_type"]].counts_scaled_positions:
        if rope["rope_type"] == "yarn":
            positions = max(positions, int((rope.get(_ORIGINAL) or positions) * factor))
        elif rope["rope_type"] in ("linear", "dynamic"):
            positions = int(positions * factor)
    limits = [positions, window or positions]
    if chunks := values.get(_DUAL_CHUNK):
        sizes = [chunks.get(name) for name in ("chunk_size", _ORIGINAL)] if isinstance(chunks, Mapping) else []
        given = [size for size in sizes if size is not None]
        if not given or not all(map(TOKENS.allow, given)):
            raise check.error(_DUAL_CHUNK, chunks, "parameters with a chunk_size")
        limits += given
    return min(limits)
