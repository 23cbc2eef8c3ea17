"""Reads a model's dimensions and features from its config, and refuses models that the decoder cannot run.

The config is that of transformers (config.json). It is read here, with the same defaults, because importing
transformers takes seconds. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import UnsupportedModel
from ..short_repr import short_repr, short_text
from ..units import MOST_TOKENS
from .config_checks import ConfigCheck, check_of_config, window_in_use, within_vocabulary
from .dims import WINDOW_SLACK, Dimensions, Experts, Heads, LinearAttention
from .families import FAMILIES, Family
from .layer_spec import FULL, LINEAR, SLIDING, LayerSpec, activation_of
from .text_part import text_config

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")  # of most families
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


@dataclass(frozen=True)
class ModelShape(Dimensions):
    """The dimensions and features of a decoder.

    `context` is the longest sequence, in tokens, that the model supports with full attention:
    `max_position_embeddings` times its RoPE scaling, or its sliding window if that is shorter, or as far as dual chunk
    attention is full attention.
    """

    family: str
    specs: tuple[LayerSpec, ...]  # of the layers, which repeat them; see `spec`
    norm_eps: float
    context: int
    sliding_window: int | None
    eos_ids: tuple[int, ...]
    rope: Mapping[str, Any] = field(hash=False)  # transformers' `rope_parameters`
    max_positions: int  # `max_position_embeddings`
    rope_divisors: tuple[float, ...] | None = None  # one per frequency, from the tensor of a GGUF file
    dual_chunk: int | None = None  # tokens up to which dual chunk attention is full attention; None: it has none
    embedding_scale: float = 1.0  # a factor of the embedding's rows
    logit_scale: float = 1.0  # a factor of the logits
    logit_cap: float = 0.0  # logits are `logit_cap * tanh(logit / logit_cap)`; 0: they are as they are
    sliding_rope: Mapping[str, Any] | None = field(default=None, hash=False)  # of layers with a window, if another
    wide_norms: bool = False  # whether the norms' weights are kept in fp32
    norm_offset: float = 0.0  # is added to the norms' weights of a checkpoint
    rounds_embedding_scale: bool = False  # whether that factor is rounded to the model's dtype
    rotates_neighbours: bool = False  # whether RoPE rotates pairs of neighbours, and not of halves, in the checkpoint

    def spec(self, layer: int) -> LayerSpec:
        """Return what layer number `layer` computes."""
        return self.specs[layer % len(self.specs)]

    @cached_property
    def full_attention(self) -> ModelShape:
        """Return the part of the model whose layers attend to all tokens: a KV cache grows for these alone."""
        return self._of_layers(FULL, self.rope, self._own_heads)

    @cached_property
    def sliding_attention(self) -> ModelShape:
        """Return the part of the model whose layers attend to a window, and have keys and values of it."""
        return self._of_layers(SLIDING, self.sliding_rope or self.rope, self.sliding_heads or self._own_heads)

    def heads_of(self, spec: LayerSpec) -> Heads:
        """Return the heads of a layer."""
        return self.sliding_heads if spec.window and self.sliding_heads else self._own_heads

    @property
    def _own_heads(self) -> Heads:
        return Heads(self.kv_heads, self.head_dim)

    @property
    def _every_spec(self) -> list[LayerSpec]:
        return [self.spec(layer) for layer in range(self.layers)]

    def _of_layers(self, kind: str, rope: Mapping[str, Any], heads: Heads) -> ModelShape:
        specs = [spec for spec in self._every_spec if spec.kind == kind and not spec.borrows]
        if len(specs) == self.layers and rope is self.rope:
            return self
        sliding = len(specs) if kind == SLIDING else 0
        more = {"sliding_layers": sliding, "rope": rope, "sliding_rope": None, "sliding_heads": None, "linear": None}
        more |= {"borrowing": (0, 0), "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        return replace(self, specs=tuple(specs), layers=len(specs), **more)

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Return for each layer its kind, as `LayerSpec.kind`, and its number among the layers of that kind.

        That of a layer that borrows is the one of the layer whose keys and values it attends to.
        """
        numbers, found = dict.fromkeys((FULL, SLIDING, LINEAR), -1), []
        for spec in self._every_spec:
            numbers[spec.kind] += not spec.borrows
            found.append((spec.kind, numbers[spec.kind]))
        return found

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
    config = text_config(config)
    family = family_of(config)
    check = (check or check_of_config("config.json")).naming(own_names(config))
    config = common_config(config)
    check.check(config)
    values = _with_defaults(config, check)
    rope = _rope_parameters(values, check)
    specs, window = _specs_and_window(values, check)
    _refuse_features(values, rope, specs)
    heads, dual_chunk = values["num_attention_heads"], dual_chunk_tokens(config, check)
    sliding_rope = _sliding_rope(values, check)
    shape = ModelShape(
        **family.features(values),
        mlp_matrices=family.mlp_matrices,
        family=family.name,
        specs=specs,
        layers=values["num_hidden_layers"],
        **_features_of_layers(values, specs, check),
        hidden=values["hidden_size"],
        heads=heads,
        **_heads(values),
        intermediate=values["intermediate_size"],
        vocab=values["vocab_size"],
        norm_eps=values["rms_norm_eps"],
        context=_context(values, rope, window, dual_chunk),
        sliding_window=window,
        tied_embeddings=values["tie_word_embeddings"],
        eos_ids=_eos_ids(values, generation, check),
        rope=rope,
        sliding_rope=sliding_rope if any(spec.window for spec in specs) else None,
        max_positions=values["max_position_embeddings"],
        rope_divisors=rope_divisors,
        dual_chunk=dual_chunk,
    )
    if shape.rotary_dim % 2 or not shape.rotary_dim:
        wanted = f"a part of {shape.head_dim} dimensions that is even"
        raise check.error("partial_rotary_factor", rope["partial_rotary_factor"], wanted)
    return shape


def checked_features(config: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return the fields of `PlanShape` for a checked config's context, heads, experts and kinds of layers.

    `config` has the names of values that families share. Raises UnsupportedModel for features that the decoder does not
    compute, and CheckpointError.
    """
    values = _with_defaults(config, check)
    specs, window = _specs_and_window(values, check)
    rope, dual_chunk = _rope_parameters(values, check), dual_chunk_tokens(config, check)
    _refuse_features(values, rope, specs)
    _sliding_rope(values, check)
    return {
        "context": _context(values, rope, window, dual_chunk),
        "dual_chunk": dual_chunk is not None,
        **_features_of_layers(values, specs, check),
        **_heads(values),
        "layer_input": values.get("hidden_size_per_layer_input") or 0,
    }


def _features_of_layers(values: Mapping[str, Any], specs: Sequence[LayerSpec], check: ConfigCheck) -> dict[str, Any]:
    """Return the fields of `Dimensions` that follow from the layers' specs. Raises as `checked_features`."""
    layers = values["num_hidden_layers"]
    every = [specs[layer % len(specs)] for layer in range(layers)]
    sliding, linear = (sum(spec.kind == kind for spec in every) for kind in (SLIDING, LINEAR))
    for count, what in ((sliding, "attend to a window"), (linear, "have linear attention")):
        if count == layers:
            raise UnsupportedModel(f"a model all of whose layers {what} is not supported", _SUPPORTED)
    return {
        "experts": _experts(values, specs, check),
        "linear": _linear_attention(values, linear, check) if linear else None,
        "gates_heads": any(spec.gates_heads for spec in every),
        "sliding_layers": sliding,
        "window_room": max(spec.window for spec in every) + WINDOW_SLACK if sliding else 0,
        "borrowing": tuple(sum(spec.borrows and spec.kind == kind for spec in every) for kind in (FULL, SLIDING)),
        "keys_are_values": any(spec.keys_are_values for spec in every),
        "wide_layers": sum(spec.width_factor == 2 for spec in every),
    }


def _linear_attention(values: Mapping[str, Any], layers: int, check: ConfigCheck) -> LinearAttention:
    key_heads, value_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if value_heads % key_heads:
        raise check.error("linear_num_key_heads", key_heads, f"a divisor of the {value_heads} value heads")
    sizes = values["linear_key_head_dim"], values["linear_value_head_dim"], values["linear_conv_kernel_dim"]
    return LinearAttention(key_heads, value_heads, *sizes, layers)


def _experts(values: Mapping[str, Any], specs: Sequence[LayerSpec], check: ConfigCheck) -> Experts | None:
    """Return the experts of the sparse layers; None if there are none. Raises CheckpointError."""
    sparse = sum(specs[layer % len(specs)].is_sparse for layer in range(values["num_hidden_layers"]))
    if not sparse:
        return None
    count, per_token = values["num_experts"], values["num_experts_per_tok"]
    if per_token > count:
        raise check.error("num_experts_per_tok", per_token, f"at most the number of experts, {count}")
    width = values.get("moe_intermediate_size") or values["intermediate_size"]
    return Experts(count, per_token, width, sparse, values.get("shared_expert_intermediate_size") or 0)


def _context(values: Mapping[str, Any], rope: Mapping[str, Any], window: int | None, dual_chunk: int | None) -> int:
    """Return how many tokens a model supports with full attention."""
    positions = values["max_position_embeddings"]
    if not FAMILIES[values["model_type"]].counts_scaled_positions:
        positions = positions_of(rope, positions)
    return min(positions, window or positions, dual_chunk or positions)


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


def common_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of a known family with the names of values that families share."""
    common = {theirs: ours for ours, theirs in FAMILIES[config["model_type"]].aliases.items()}
    return {common.get(name, name): value for name, value in config.items()}


def own_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that a config of a known family has of values that others call otherwise, by the others'."""
    aliases = FAMILIES[config["model_type"]].aliases
    return {ours: theirs for ours, theirs in aliases.items() if theirs in config}


def default_of(family: str, name: str) -> Any:
    """Return what a family's config has for an absent value; None where it follows from others."""
    return (_DEFAULTS | FAMILIES[family].defaults).get(name)


def _with_defaults(config: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return a checked config with transformers' defaults for absent values. Raises CheckpointError."""
    values = _DEFAULTS | FAMILIES[config["model_type"]].defaults | dict(config)
    check.heads(values)
    if values["model_type"] == "llama" and values["hidden_size"] % values["num_attention_heads"]:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        raise check.error("num_attention_heads", heads, f"a divisor of the hidden size of {hidden}")
    return values


def _specs_and_window(values: Mapping[str, Any], check: ConfigCheck) -> tuple[tuple[LayerSpec, ...], int | None]:
    """Return the specs of the layers, and the window at which the context ends, None without one.

    It ends there where all layers have the same window: up to it, they attend to all tokens.
    """
    family = FAMILIES[values["model_type"]]
    specs = tuple(family.layers(values))
    if not family.has_layer_windows:
        return specs, window_in_use(values)
    windows = {spec.window for spec in specs}
    if 0 in windows or check.sliding_rope_of(values) is not None:
        return specs, None
    return tuple(replace(spec, window=0) for spec in specs), max(windows)


def _heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Dimensions` for KV heads."""
    if (family := FAMILIES[values["model_type"]]).heads is not None:
        return family.heads(values)
    heads = values["num_attention_heads"]
    head_dim = values["head_dim"] or values["hidden_size"] // heads
    return {"kv_heads": values["num_key_value_heads"] or heads, "head_dim": head_dim}


def _rope_parameters(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any]:
    """Return the RoPE parameters, completed as transformers does."""
    rope = check.rope_of(values)
    rope.setdefault("rope_theta", 10000.0)
    if rope["rope_type"] in _STORES_ORIGINAL:
        name = "original_max_position_embeddings"
        if name in FAMILIES[values["model_type"]].defaults:  # a family that has it outside of the parameters
            rope[name] = values[name]
        rope.setdefault(name, values["max_position_embeddings"])
    return rope


def _sliding_rope(values: Mapping[str, Any], check: ConfigCheck) -> dict[str, Any] | None:
    """Return the RoPE parameters of the layers with a window; None if they are those of the others."""
    rope = check.sliding_rope_of(values)
    if rope is not None and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("RoPE on a part of each head in layers with a window is not supported", _SUPPORTED)
    if rope is not None and rope["rope_type"] != "default":
        raise UnsupportedModel(
            f"the RoPE type {short_repr(rope['rope_type'])} in layers with a window is not supported", _SUPPORTED
        )
    return rope


def _refuse_features(values: Mapping[str, Any], rope: Mapping[str, Any], specs: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedModel for RoPE and activations that the decoder does not compute."""
    family = FAMILIES[values["model_type"]]
    if rope["rope_type"] not in (family.only_rope or ROPE_TYPES):
        raise UnsupportedModel(f"the RoPE type {short_repr(rope['rope_type'])} is not supported", _SUPPORTED)
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not family.has_partial_rope:
        raise UnsupportedModel("RoPE on a part of each head (partial_rotary_factor) is not supported", _SUPPORTED)
    activation = activation_of(values["hidden_act"])
    if not activation or any(spec.activation != activation for spec in specs):
        raise UnsupportedModel(f"the activation {short_repr(values['hidden_act'])} is not supported", _SUPPORTED)


def _eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any], check: ConfigCheck) -> tuple[int, ...]:
    """Return the end-of-sequence ids of both configs that are in the vocabulary. Raises CheckpointError."""
    ids = [*check.token_ids(values["eos_token_id"]), *check.token_ids(generation.get("eos_token_id"))]
    return within_vocabulary(ids, values["vocab_size"])
