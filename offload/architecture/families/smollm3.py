"""SmolLM3: Llama with some layers without RoPE."""

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values

_INTERVAL = 4  # every fourth layer has no RoPE


def _layers(values: Values) -> list[LayerSpec]:
    if values["use_sliding_window"]:
        raise UnsupportedModel("SmolLM3 with sliding windows is not supported", "use a model without them")
    interval = values.get("no_rope_layer_interval", _INTERVAL)
    rotates = values.get("no_rope_layers") or [(i + 1) % interval for i in range(values["num_hidden_layers"])]
    bias = values["attention_bias"]
    return [
        LayerSpec(qkv_bias=bias, o_bias=bias, mlp_bias=values["mlp_bias"], rotates=bool(rotated))
        for rotated in rotates[: values["num_hidden_layers"]]
    ]


SMOLLM3 = Family(
    "smollm3",
    _layers,
    {"tie_word_embeddings": True, "eos_token_id": 128001, "rope_theta": 2000000.0},
    has_optional_window=True,
    gguf=GGUFNames("smollm3", permutes=True),
)
