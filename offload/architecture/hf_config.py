"""Reads a model's dimensions and features from its config, and refuses models that the decoder cannot run.

The config is that of transformers (config.json). It is read here, with the same defaults, because importing
transformers takes seconds. Imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ModelNotFound, UnsupportedModel
from ..short_repr import short_repr, short_text
from .checkpoint_json import read_json
from .config import ModelShape
from .config_checks import ConfigCheck, check_of_config, window_in_use
from .dims import LinearAttention
from .families import FAMILIES, Family
from .families.family import text_config
from .layer_spec import LINEAR, SLIDING, Experts, LayerSpec, activation_of
from .rope_config import (
    ROPE_TYPES,
    SUPPORTED,
    context_of,
    rope_parameters,
    sliding_rope_parameters,
)

_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_DEFAULTS: dict[str, Any] = {  # transformers' defaults for values that a config leaves out
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window", "eos_token_id")),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), False),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


def shape_from_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, check: ConfigCheck | None = None
) -> ModelShape:
    """Return the shape of a model from its config.

    Args:
        config: the values of config.json. Absent values have transformers' defaults.
        generation: the values of generation_config.json; its end-of-sequence ids are added to the config's. None: they
            are not known, and the shape has no such ids, as for a plan.
        check: names the file in errors; None for config.json without its path.

    Raises:
        UnsupportedModel: for any other architecture, RoPE type or activation.
        CheckpointError: for values that are wrong.
    """
    config = text_config(config)
    family = family_of(config)
    check = check or check_of_config("config.json")
    common = {theirs: ours for ours, theirs in family.aliases.items()}
    config = {common.get(name, name): value for name, value in config.items()}
    values = _DEFAULTS | family.defaults | config
    if missing := [name for name in _REQUIRED if name not in values]:
        raise CheckpointError(f"{check.place} has no {missing[0]}", check.hint)
    check.check(values)
    check.heads(values)
    ends = () if generation is None else (values["eos_token_id"], generation.get("eos_token_id"))
    rope, sliding_rope = rope_parameters(values, check), sliding_rope_parameters(values, check)
    specs, window = _specs_and_window(values, sliding_rope)
    _refuse_features(values, rope, specs)
    heads = values["num_attention_heads"]
    head_dim = values["head_dim"] or values["hidden_size"] // heads
    own_heads = {"kv_heads": values["num_key_value_heads"] or heads, "head_dim": head_dim}
    shape = ModelShape(
        **family.features(values),
        family=family.name,
        specs=specs,
        layers=values["num_hidden_layers"],
        **_features_of_layers(values, specs, check),
        hidden=values["hidden_size"],
        heads=heads,
        **(family.heads(values) if family.heads else own_heads),
        intermediate=values["intermediate_size"],
        vocab=values["vocab_size"],
        norm_eps=values["rms_norm_eps"],
        context=context_of(values, rope, window, check),
        sliding_window=window,
        tied_embeddings=values["tie_word_embeddings"],
        eos_ids=check.end_ids(ends, values["vocab_size"]),
        rope=rope,
        sliding_rope=sliding_rope if any(spec.window for spec in specs) else None,
        max_positions=values["max_position_embeddings"],
    )
    if shape.rotary_dim % 2 or not shape.rotary_dim:
        wanted = f"a part of {shape.head_dim} dimensions that is even"
        raise check.error("partial_rotary_factor", rope.get("partial_rotary_factor"), wanted)
    return shape


def read_shape(file: Path) -> ModelShape:
    """Return the shape that a config.json gives, without end-of-sequence ids; a plan needs no more of a model.

    Raises as `shape_from_config`, and ModelNotFound where there is no such file.
    """
    config = read_json(file)
    if not config:
        hint = "--model takes a folder with config.json and safetensors"
        raise ModelNotFound(f"there is no config.json in {file.parent}", hint)
    return shape_from_config(config, None, check_of_config(file))


def _features_of_layers(values: Mapping[str, Any], specs: Sequence[LayerSpec], check: ConfigCheck) -> dict[str, Any]:
    """Return the experts and the linear attention that some layers have. Raises as `shape_from_config`."""
    layers = values["num_hidden_layers"]
    every = [specs[layer % len(specs)] for layer in range(layers)]
    sliding, linear = (sum(spec.kind == kind for spec in every) for kind in (SLIDING, LINEAR))
    sparse = sum(spec.is_sparse for spec in every)
    for count, what in ((sliding, "attend to a window"), (linear, "have linear attention")):
        if count == layers:
            raise UnsupportedModel(f"a model all of whose layers {what} is not supported", SUPPORTED)
    return {
        "experts": _experts(values, sparse, check) if sparse else None,
        "linear": _linear_attention(values, linear, check) if linear else None,
    }


def _linear_attention(values: Mapping[str, Any], layers: int, check: ConfigCheck) -> LinearAttention:
    key_heads, value_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if value_heads % key_heads:
        raise check.error("linear_num_key_heads", key_heads, f"a divisor of the {value_heads} value heads")
    sizes = values["linear_key_head_dim"], values["linear_value_head_dim"], values["linear_conv_kernel_dim"]
    return LinearAttention(key_heads, value_heads, *sizes, layers)


def _experts(values: Mapping[str, Any], layers: int, check: ConfigCheck) -> Experts:
    """Return the experts of so many sparse layers. Raises CheckpointError."""
    if "num_experts_per_tok" not in values:
        raise check.error("num_experts", values.get("num_experts"), "no experts in this family, or num_experts_per_tok")
    count, per_token = values["num_experts"], values["num_experts_per_tok"]
    if per_token > count:
        raise check.error("num_experts_per_tok", per_token, f"at most the number of experts, {count}")
    width = values.get("moe_intermediate_size") or values["intermediate_size"]
    shared = values.get("shared_expert_intermediate_size") or (values.get("n_shared_experts") or 0) * width
    return Experts(count, per_token, width, layers, shared)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config. Raises UnsupportedModel for an architecture that the decoder does not compute."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    names = config.get("architectures")
    names = ", ".join(map(str, names)) if names and isinstance(names, list) else names or "without a name"
    raise UnsupportedModel(
        f"the architecture {short_text(str(names))} ({short_text(str(name))}) is not supported",
        f"what runs: {', '.join(FAMILIES)}",
    )


def _specs_and_window(values: Mapping[str, Any], sliding_rope: Any) -> tuple[tuple[LayerSpec, ...], int | None]:
    """Return the specs of the layers, and the window at which the context ends, None without one.

    It ends there where all layers have the same window: up to it, they attend to all tokens.
    """
    family = FAMILIES[values["model_type"]]
    specs = tuple(family.layers(values))
    if not family.has_layer_windows:
        return specs, window_in_use(values)
    windows = {spec.window for spec in specs}
    if 0 in windows or sliding_rope is not None:
        return specs, None
    return tuple(replace(spec, window=0) for spec in specs), max(windows)


def _refuse_features(values: Mapping[str, Any], rope: Mapping[str, Any], specs: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedModel for RoPE and activations that the decoder does not compute."""
    family = FAMILIES[values["model_type"]]
    if rope["rope_type"] not in (family.only_rope or ROPE_TYPES):
        raise UnsupportedModel(f"the RoPE type {short_repr(rope['rope_type'])} is not supported", SUPPORTED)
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not family.has_partial_rope:
        raise UnsupportedModel("RoPE on a part of each head (partial_rotary_factor) is not supported", SUPPORTED)
    activation = activation_of(values["hidden_act"])
    if not activation or any(spec.activation != activation for spec in specs):
        raise UnsupportedModel(f"the activation {short_repr(values['hidden_act'])} is not supported", SUPPORTED)
