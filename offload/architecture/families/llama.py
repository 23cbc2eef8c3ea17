"""Llama, and models published in its format, such as Yi, SmolLM2 and LWM; and near relatives.

Seed-OSS has biases of q, k and v, ERNIE 4.5 rotates neighbours, SmolLM3 has layers without RoPE, and Phi-3, Phi-3.5 and
Phi-4 have fused tensors; Phi-4-mini has RoPE on a part of each head.
"""

from dataclasses import replace

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import FUSED_MLP, FUSED_QKV, Family, GGUFNames, Values, layer_specs


def _layers(values: Values) -> list[LayerSpec]:
    return layer_specs(values, mlp_bias=values["mlp_bias"])


LLAMA = Family(
    "llama",
    _layers,
    {"max_position_embeddings": 2048, "eos_token_id": 2},
    gguf=GGUFNames(  # Mistral's, too
        "llama", {"sliding_window": "attention.sliding_window"}, permutes=True, sparse="mixtral"
    ),
)
SEED_OSS = Family(
    "seed_oss",
    lambda values: layer_specs(values, o_bias=values["attention_out_bias"], mlp_bias=values["mlp_bias"]),
    {"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "eos_token_id": 2},
    gguf=GGUFNames("seed_oss"),
)
ERNIE4_5 = Family(
    "ernie4_5",
    lambda values: layer_specs(values, mlp_bias=values["attention_bias"]),
    {"head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2, "tie_word_embeddings": True, "rope_theta": 500000.0},
    aliases={"attention_bias": "use_bias"},
    features=lambda values: {"rotates_neighbours": True},
    gguf=GGUFNames("ernie4_5"),
)
_INTERVAL = 4  # every fourth layer of SmolLM3 has no RoPE


def _smollm3(values: Values) -> list[LayerSpec]:
    if values["use_sliding_window"]:
        raise UnsupportedModel("SmolLM3 with sliding windows is not supported", "use a model without them")
    interval, (spec,) = values.get("no_rope_layer_interval", _INTERVAL), _layers(values)
    rotates = values.get("no_rope_layers") or [(i + 1) % interval for i in range(values["num_hidden_layers"])]
    return [replace(spec, rotates=bool(rotated)) for rotated in rotates[: values["num_hidden_layers"]]]


SMOLLM3 = Family(
    "smollm3",
    _smollm3,
    {"tie_word_embeddings": True, "eos_token_id": 128001, "rope_theta": 2000000.0},
    has_optional_window=True,
    gguf=GGUFNames("smollm3", permutes=True),
)
PHI3 = Family(
    "phi3",
    lambda values: [LayerSpec()],
    {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000}
    | {"partial_rotary_factor": 1.0},
    rope_types={"su": "longrope", "yarn": "longrope"},
    only_rope=("default", "longrope"),  # as in transformers
    has_partial_rope=True,
    fused=FUSED_QKV | FUSED_MLP,
    gguf=GGUFNames("phi3", {"sliding_window": "attention.sliding_window"}),
)
