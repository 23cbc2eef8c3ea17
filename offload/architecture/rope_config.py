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
_STORES_ORIGINAL = ("llama3", "yarn", "longrope")  # RoPE types with `original_max_position_embeddings`
ROPE_NUMBERS = {
    "rope_theta": Limits(float, 2, 1e30, 10000),
    "factor": Limits(float, 1, 2**20, 4),
    "original_max_position_embeddings": Limits(float, 2, MOST_TOKENS, 8192),
    "low_freq_factor": Limits(float, 1e-3, 1e6, 1),
    "high_freq_factor": Limits(float, 1e-3, 1e6, 4),
    "beta_fast": Limits(float, 1e-3, 1e6, 32, null=True),
    "beta_slow": Limits(float, 1e-3, 1e6, 1, null=True),
    "attention_factor": Limits(float, 1e-3, 1e3, 1, null=True),
    "llama_4_scaling_beta": Limits(float, 0, 1e3, 0.1),
    "mscale": Limits(float, 0, 1e3, 1, null=True),
    "mscale_all_dim": Limits(float, 0, 1e3, 1, null=True),
    "partial_rotary_factor": Limits(float, 0, 1, 1),
}
DIVISOR = Limits(float, 1e-3, 1e6, 1)  # in the lists of longrope
ROPE_LISTS = ("short_factor", "long_factor")
EVERY_ROPE = ("rope_theta", "partial_rotary_factor")
OF_ROPE_TYPE = {  # the parameters that transformers reads, and those that it requires
    "linear": (("factor",), ("factor",)),
    "dynamic": (("factor",), ("factor",)),
    "yarn": (
        (
            *("factor", "original_max_position_embeddings", "beta_slow", "beta_fast"),
            *("attention_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta"),
        ),
        ("factor",),
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        ("factor", "low_freq_factor", "high_freq_factor"),
    ),
    "longrope": (("factor", "original_max_position_embeddings", "attention_factor", *ROPE_LISTS), ROPE_LISTS),
}
QUERY_SCALING = ("llama_4_scaling_beta", "original_max_position_embeddings")
RATIO_TYPES = ("yarn", "longrope")  # types whose factor may be null: the ratio of two contexts
ASCENDING = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


def check_rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> None:
    """Check the RoPE parameters of a config, before defaults are added. Raises CheckpointError."""
    rope = _rope_of(values, check)
    _check_rope(rope, check)
    for name in QUERY_SCALING if FAMILIES[values["model_type"]].scales_queries else ():
        if name in rope and QUERY_SCALING[0] in rope:  # whatever the type of RoPE reads
            check.number(name, rope[name], ROPE_NUMBERS[name])
    if sliding := sliding_rope_of(values, check):
        _check_rope(sliding, check)


def _check_rope(rope: Mapping[str, Any], check: ConfigCheck) -> None:
    """Check the merged RoPE parameters that the RoPE type reads."""
    kind = rope.get("rope_type")
    read, required = OF_ROPE_TYPE.get(kind if isinstance(kind, str) else "", ((), ()))
    for name in required:
        if name not in rope:
            raise CheckpointError(f"{check.place}: RoPE {kind} without {name}", check.hint)
    for name in (*EVERY_ROPE, *read):
        if name not in rope or (name == "factor" and rope[name] is None and kind in RATIO_TYPES):
            continue
        if name in ROPE_LISTS:
            _check_divisors(name, rope[name], check)
        else:
            check.number(name, rope[name], ROPE_NUMBERS[name])
    if kind == "yarn" and not isinstance(rope.get("truncate", True), bool):
        raise check.error("truncate", rope["truncate"], "true or false")
    for lower, higher in ASCENDING:
        first, second = rope.get(lower), rope.get(higher)
        if lower in read and first is not None and second is not None and first >= second:
            raise check.error(lower, first, f"below {check.names.get(higher, higher)}, which is {short_repr(second)}")


def _check_divisors(name: str, value: Any, check: ConfigCheck) -> None:
    """Check a list of longrope."""
    if not isinstance(value, list) or not value or not all(map(DIVISOR.allow, value)):
        raise check.error(name, value, f"a list with {DIVISOR} for every frequency")


def _rope_of(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return a config's RoPE parameters as one mapping, merged as transformers does.

    Older files have `rope_scaling` with `type`, and `rope_theta` outside of it. Raises CheckpointError for anything
    but a mapping of values, such as separate parameters for each kind of layer.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name) or {}
    if _is_by_kind(rope, values):
        rope = rope.get(FULL) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise check.error(name, rope, "RoPE parameters that hold for all layers")
    merged = {"rope_type": rope.get("type", "default"), **rope}
    family = FAMILIES[values["model_type"]]
    if isinstance(merged["rope_type"], str):
        merged["rope_type"] = family.rope_types.get(merged["rope_type"], merged["rope_type"])
    if "rope_theta" in values:
        merged.setdefault("rope_theta", values["rope_theta"])
    if values.get("partial_rotary_factor") is not None:
        merged.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    return merged


def sliding_rope_of(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any] | None:
    """Return the RoPE parameters of layers with a window; None if they are those of the others."""
    family, rope = FAMILIES[values["model_type"]], values.get("rope_parameters") or {}
    if not family.has_layer_windows:
        return None
    if _is_by_kind(rope, values):
        rope = rope.get(SLIDING)
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise check.error("rope_parameters", values["rope_parameters"], f"RoPE parameters with {SLIDING}")
        return {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return family.sliding_rope(values) if family.sliding_rope else None


def _is_by_kind(rope: Any, values: Mapping[str, Any]) -> bool:
    """Return whether RoPE parameters are those of each kind of layer."""
    has_windows = FAMILIES[values["model_type"]].has_layer_windows
    return has_windows and isinstance(rope, Mapping) and FULL in rope


def rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return the RoPE parameters, completed as transformers does."""
    rope = _rope_of(values, check)
    rope.setdefault("rope_theta", 10000.0)
    if rope["rope_type"] in _STORES_ORIGINAL:
        name = "original_max_position_embeddings"
        if name in FAMILIES[values["model_type"]].defaults:  # a family that has it outside of the parameters
            rope[name] = values[name]
        rope.setdefault(name, values["max_position_embeddings"])
    return rope


def sliding_rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any] | None:
    """Return the RoPE parameters of the layers with a window; None if they are those of the others."""
    rope = sliding_rope_of(values, check)
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
