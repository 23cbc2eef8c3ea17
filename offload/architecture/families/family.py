"""A family of models: how its config, layers and tensors are read, and how its text part lies in models of images."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..layer_spec import FULL, LINEAR, SLIDING, LayerSpec

# `model_type`s whose text part is a model of a family, computed as if it were alone; the family that it usually is.
WRAPPERS = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_PREFIXES = {  # as transformers has saved such models before and after version 5
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}

_TEXT: tuple[str, ...] = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_TEXT += ("model.embed_tokens_per_layer.", "model.per_layer_")


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model of several parts whose text part runs."""
    name = config.get("model_type")
    return isinstance(name, str) and name in WRAPPERS and isinstance(config.get("text_config"), Mapping)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text part; the config itself where there is no other part."""
    if not is_wrapper(config):
        return config
    outer = {name: config[name] for name in ("tie_word_embeddings", "eos_token_id") if config.get(name) is not None}
    return dict(config["text_config"]) | outer


def text_name(name: str) -> str:
    """Return a tensor's name as in a model of the text part alone; names of other parts stay as they are."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name[len(prefix) :]


def is_text(name: str) -> bool:
    """Return whether a tensor, by what `text_name` returns, is of the text part."""
    return name.startswith(_TEXT)


def decoder_test(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that tells the decoder's tensors from those of layers that predict further tokens (MTP).

    These are called mtp, or numbered as if they were the decoder's next ones.
    """
    layers, names = config.get("num_hidden_layers"), ("num_nextn_predict_layers", "num_mtp_layers")
    further = next((count for name in names if type(count := config.get(name)) is int), 0)
    numbers = range(layers, layers + min(further, 16)) if isinstance(layers, int) else ()
    others = ("mtp.", *(f"model.layers.{number}." for number in numbers))
    return lambda name: not name.startswith(others)


Values = Mapping[str, Any]  # of a config.json, with defaults for absent ones
_EXPERT = re.compile(r"\.(\d+)\.")  # the number in a layer's `mlp.experts.7.up_proj`
STACKED_EXPERTS = {  # in files of transformers 5
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}
FUSED_QKV: dict[str, Sequence[str]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
}
FUSED_MLP: dict[str, Sequence[str]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


def layer_specs(values: Values, every: Any = None, **features: Any) -> list[LayerSpec]:
    """Return the specs of layers with `features`, or one that all layers repeat.

    Attention has the biases that `attention_bias` says, windows lie as `layer_windows` says if `every` is given, and a
    layer has a `router` and its experts where `sparse_layers` says so.
    """
    bias = values["attention_bias"]
    sparse = LayerSpec(**{"qkv_bias": bias, "o_bias": bias} | features)
    dense = replace(sparse, router="", shares_expert=False)
    windows = layer_windows(values, every) if every else [0] * values["num_hidden_layers"]
    pairs = zip(windows, sparse_layers(values), strict=True)
    specs = [replace(sparse if is_sparse else dense, window=window) for window, is_sparse in pairs]
    return specs[:1] if len(set(specs)) == 1 else specs


def layer_windows(values: Values, every: Any) -> list[int]:
    """Return the window of each layer, 0 for none: as in `layer_types`, else by a pattern.

    `every`: each so-many-th layer has none; or for each layer whether it has one, or L or G, from the first one on.
    """
    layers, window = values["num_hidden_layers"], values["sliding_window"] or 0
    if kinds := values.get("layer_types"):
        has_window = [kind == SLIDING for kind in kinds]
    elif isinstance(every, int):
        has_window = [(i + 1) % every > 0 for i in range(layers)]
    else:
        has_window = [every[i % len(every)] in (True, "L") for i in range(layers)]
    return [window if has else 0 for has in has_window[:layers]]


def sparse_layers(values: Values) -> list[bool]:
    """Return for each layer whether it has experts: in a family with experts all, but those that the config names."""
    dense, period = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step") or 1
    has_experts, first = bool(values.get("num_experts")), values.get("first_k_dense_replace") or 0
    layers = range(values["num_hidden_layers"])
    if kinds := values.get("mlp_layer_types"):
        return [has_experts and kind == "sparse" for kind in kinds[: len(layers)]]
    return [has_experts and layer >= first and layer not in dense and (layer + 1) % period == 0 for layer in layers]


def linear_layers(values: Values) -> list[bool]:
    """Return for each layer whether its attention is linear: as in `layer_types`, else all but every fourth."""
    layers, every = values["num_hidden_layers"], values["full_attention_interval"]
    kinds = values.get("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    return [kind == LINEAR for kind in kinds[:layers]]


@dataclass(frozen=True)
class GGUFNames:
    """The names of values in GGUF files of a family. Tensors' names follow from `Family.tensors`.

    Attributes:
        architecture: the value of general.architecture, which all other keys begin with.
        keys: names of values in config.json -> keys in the file, beside those of sizes, experts and windows.
        permutes: whether the rows of q and k are stored as pairs of neighbours, where safetensors have halves.
        left_out: values of config.json that the published models have and files do not.
        yarn: such values of their RoPE parameters, where files have YaRN.
        adds_norm_offset: whether files already have the family's `norm_offset` in the norms' weights.
        switches: keys that turn off what all models of the family have where they are false.
        sparse: the family of the architecture's files with experts; "" if it has none, or no others.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    permutes: bool = False
    left_out: Values = field(default_factory=dict)
    yarn: Values = field(default_factory=dict)
    switches: Sequence[str] = ()
    sparse: str = ""
    adds_norm_offset: bool = False


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` are read.

    Attributes:
        name: the `model_type`.
        layers: returns the layers' specs; further layers repeat them. May raise UnsupportedModel.
        defaults: transformers' values for absent keys of a config, where they differ from the common ones.
        not_null: values that others' configs may have as null, for one that follows from others.
        aliases: the family's names of values in its config.json, by the common names.
        rope_types: names of RoPE types in the family's configs -> what they mean.
        only_rope: the RoPE types that the family may have; none: all.
        has_partial_rope: whether RoPE may rotate a part of each head: `partial_rotary_factor`.
        has_optional_window: whether a config's sliding window counts only with `use_sliding_window`.
        has_layer_windows: whether some layers attend to a window of `sliding_window` tokens, and others to all.
        has_linear_layers: whether some layers have linear attention, and others attend to all tokens.
        groups_linear_rows: whether rows of their projections are stored by key head: of each its q, k, v and z.
        sliding_rope: returns the RoPE parameters of the layers with a window, where a config does not have them apart;
            None: all layers have the same.
        scales_queries: whether queries grow with their position as RoPE parameters say, see `ModelShape.query_scaling`.
        counts_scaled_positions: whether `max_position_embeddings` counts the positions after linear RoPE scaling.
        heads: returns the fields of `Dimensions` for KV heads, where layers with a window have other heads.
        features: returns further fields of `ModelShape`.
        tensors: the family's names of tensors, by Llama's names, or by the names in `LAYER_NORMS`.
        fused: tensors that are several of Llama's, one below the other.
        stacked: tensors of a layer in safetensors with the matrices of all experts: their names -> those of each
            expert's matrices, one below the other, with * in place of its number. Names of MXFP4 are without _blocks.
        transposes_experts: whether those matrices, if they are not quantised, are stored with rows of inputs.
        interleaves_experts: whether the rows of several matrices alternate.
        gguf: how GGUF files are read; None if they are not.
    """

    name: str
    layers: Callable[[Values], Sequence[LayerSpec]]
    defaults: dict[str, Any] = field(default_factory=dict)
    not_null: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_types: Mapping[str, str] = field(default_factory=dict)
    only_rope: Sequence[str] = ()
    has_partial_rope: bool = False
    has_optional_window: bool = False
    has_layer_windows: bool = False
    has_linear_layers: bool = False
    groups_linear_rows: bool = False
    sliding_rope: Callable[[Values], dict[str, Any]] | None = None
    scales_queries: bool = False
    counts_scaled_positions: bool = False
    heads: Callable[[Values], dict[str, Any]] | None = None
    features: Callable[[Values], dict[str, Any]] = lambda values: {}
    tensors: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    stacked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    transposes_experts: bool = False
    interleaves_experts: bool = False
    gguf: GGUFNames | None = None

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers that `layer_types` may have; none where a config's is not read."""
        if self.has_linear_layers:
            return FULL, LINEAR
        return (FULL, SLIDING) if self.has_layer_windows else ()

    def checkpoint_name(self, name: str) -> str:
        """Return the family's name of a layer's tensor, or of the module that has it.

        Experts have one name, with * in place of their numbers.
        """
        plain = _EXPERT.sub(".*.", name, count=1)
        own = next((whole for whole, parts in self.fused.items() if plain in parts), self.tensors.get(plain, plain))
        number = _EXPERT.search(name)
        return own if number is None else own.replace("*", number[1])
