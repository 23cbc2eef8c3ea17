"""Command-R and Command-R7B: attention and MLP side by side behind one LayerNorm without bias, and scaled logits.

RoPE rotates neighbours; Command-R7B has windows, and RoPE in their layers alone. StarCoder2 is the other family with
LayerNorm: with biases, and an MLP without a gate.
"""

from dataclasses import replace

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec, activation_of
from .family import Family, GGUFNames, Values, layer_specs


def _layers(values: Values, every: int | None = None) -> list[LayerSpec]:
    if values.get("use_qk_norm"):
        raise UnsupportedModel("Command-R+ with norms of q and k is not supported", "use Command-R without them")
    return layer_specs(values, every, norm="layer", is_parallel=True)


def _windowed_layers(values: Values) -> list[LayerSpec]:
    specs = _layers(values, values.get("sliding_window_pattern") or 4)
    return [replace(spec, rotates=spec.window > 0) for spec in specs]


_DEFAULTS = {"logit_scale": 0.0625, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 255001}
_KEYS = {"rms_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
COHERE = Family(
    "cohere",
    _layers,
    _DEFAULTS | {"rope_theta": 500000.0},
    aliases={"rms_norm_eps": "layer_norm_eps"},
    features=lambda values: {"logit_scale": values["logit_scale"], "rotates_neighbours": True},
    gguf=GGUFNames("command-r", _KEYS),
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    layers=_windowed_layers,
    defaults=_DEFAULTS | {"sliding_window": 4096},
    has_layer_windows=True,
    gguf=GGUFNames("cohere2", _KEYS),
)


def _starcoder2(values: Values) -> list[LayerSpec]:
    activation, bias = activation_of(values["hidden_act"]), values["attention_bias"]
    return layer_specs(values, mlp_bias=bias, norm="layer", norm_bias=True, activation=activation, is_gated=False)


STARCODER2 = Family(
    "starcoder2",
    _starcoder2,
    {
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "tie_word_embeddings": True,  # transformers' default of eos_token_id is not in the vocabulary
    },
    aliases={"attention_bias": "use_bias", "rms_norm_eps": "norm_epsilon"},
    tensors={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    gguf=GGUFNames(
        "starcoder2",
        {"rms_norm_eps": "attention.layer_norm_epsilon", "sliding_window": "attention.sliding_window"},
        left_out={"sliding_window": 4096},
    ),
)
