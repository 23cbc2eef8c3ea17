"""Reads a model's dimensions and features from its config, and refuses models that the decoder cannot run.

The config is that of transformers (config.json). It is read here, with the same defaults, because importing
transformers takes seconds. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedModel
from ..short_repr import short_repr, short_text
from ..units import MOST_TOKENS
from .config_checks import ConfigCheck, check_of_config, window_in_use, within_vocabulary
from .dims import Dimensions

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_SUPPORTED = f"what runs: {', '.join(FAMILIES)}, with RoPE {', '.join(ROPE_TYPES)}"
_STORES_ORIGINAL = ("llama3", "yarn", "longrope")  # RoPE types with `original_max_position_embeddings`

# transformers' defaults for values that a config leaves out.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "eos_token_id": None,
}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}


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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    rope: Mapping[str, Any] = field(hash=False)  # transformers' `rope_parameters`
    max_positions: int  # `max_position_embeddings`
    rope_divisors: tuple[float, ...] | None = None  # one per frequency, from the tensor of a GGUF file
    dual_chunk: int | None = None  # tokens up to which dual chunk attention is full attention; None: it has none

    @property
    def rope_type(self) -> str:
        """Return the type of the RoPE scaling; "default" for none."""
        return self.rope["rope_type"]

    @property
    def rope_depends_on_length(self) -> bool:
        """Return whether the angles at a position depend on the longest length of the sequence."""
        return self.rope_type in ("dynamic", "longrope")


def positions_of(rope: Mapping[str, Any], positions: int) -> int:
    """Return how many positions a model supports, from its RoPE parameters and `max_position_embeddings`.

    Configs give that number after scaling for llama3 and longrope, before scaling for others.
    """
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind == "yarn":
        return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
    return int(positions * factor) if kind in ("linear", "dynamic") else positions


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


def shape_from_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    rope_divisors: tuple[float, ...] | None = None,
    check: ConfigCheck | None = None,
) -> ModelShape:
    """Return the shape of a model from its config.

    Args:
        config: the values of config.json. Absent values have transformers' defaults.
        generation: the values of generation_config.json; its end-of-sequence ids are added to the config's.
        rope_divisors: `[head_dim / 2]`, see ModelShape.
        check: names the file in errors; None for config.json without its path.

    Raises:
        UnsupportedModel: for any other architecture, RoPE type or activation.
        CheckpointError: for values that are wrong.
    """
    check = check or check_of_config("config.json")
    _refuse_family(config)
    check.check(config)
    values = _with_defaults(config, check)
    rope = _rope_parameters(values, check)
    _refuse_features(values, rope)
    family, heads = values["model_type"], values["num_attention_heads"]
    window = window_in_use(family, values["sliding_window"], values["use_sliding_window"])
    context = positions_of(rope, values["max_position_embeddings"])
    dual_chunk = dual_chunk_tokens(config, check)
    return ModelShape(
        **_features(values),
        family=family,
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        heads=heads,
        kv_heads=values["num_key_value_heads"] or heads,
        head_dim=values["head_dim"] or values["hidden_size"] // heads,
        intermediate=values["intermediate_size"],
        vocab=values["vocab_size"],
        norm_eps=values["rms_norm_eps"],
        context=min(context, window or context, dual_chunk or context),
        sliding_window=window,
        tied_embeddings=values["tie_word_embeddings"],
        eos_ids=_eos_ids(values, generation, check),
        rope=rope,
        max_positions=values["max_position_embeddings"],
        rope_divisors=rope_divisors,
        dual_chunk=dual_chunk,
    )


def _refuse_family(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for an architecture that the decoder does not compute."""
    family = config.get("model_type")
    if family in FAMILIES:
        return
    names = config.get("architectures")
    names = ", ".join(map(str, names)) if names and isinstance(names, list) else names or "without a name"
    raise UnsupportedModel(
        f"the architecture {short_text(str(names))} ({short_text(str(family))}) is not supported",
        f"what runs: {', '.join(FAMILIES)}",
    )


def default_of(family: str, name: str) -> Any:
    """Return what a family's config has for an absent value; None where it follows from others."""
    return (_DEFAULTS | _FAMILY_DEFAULTS[family]).get(name)


def _with_defaults(config: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return a checked config with transformers' defaults for absent values. Raises CheckpointError."""
    values = _DEFAULTS | _FAMILY_DEFAULTS[config["model_type"]] | dict(config)
    check.heads(values)
    if values["model_type"] == "llama" and values["hidden_size"] % values["num_attention_heads"]:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        raise check.error("num_attention_heads", heads, f"a divisor of the hidden size of {hidden}")
    return values


def _rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return the RoPE parameters, completed as transformers does."""
    rope = check.rope_of(values)
    rope.setdefault("rope_theta", 10000.0)
    if rope["rope_type"] in _STORES_ORIGINAL:
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return rope


def _refuse_features(values: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for RoPE and activations that the decoder does not compute."""
    if rope["rope_type"] not in ROPE_TYPES:
        raise UnsupportedModel(f"the RoPE type {short_repr(rope['rope_type'])} is not supported", _SUPPORTED)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("RoPE on a part of each head (partial_rotary_factor) is not supported", _SUPPORTED)
    if values["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedModel(f"the activation {short_repr(values['hidden_act'])} is not supported", _SUPPORTED)


def _features(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return which of a model's linears have a bias, and whether it normalises q and k.

    Qwen2 always has a bias on q, k and v. Llama and Qwen3 have one on q, k, v and the output with `attention_bias`.
    """
    family, attention_bias = values["model_type"], values["attention_bias"]
    return {
        "qkv_bias": attention_bias or family == "qwen2",
        "o_bias": attention_bias and family in ("llama", "qwen3"),
        "mlp_bias": values["mlp_bias"] and family == "llama",
        "qk_norm": family == "qwen3",
    }


def _eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any], check: ConfigCheck) -> tuple[int, ...]:
    """Return the end-of-sequence ids of both configs that are in the vocabulary. Raises CheckpointError."""
    ids = [*check.token_ids(values["eos_token_id"]), *check.token_ids(generation.get("eos_token_id"))]
    return within_vocabulary(ids, values["vocab_size"])
