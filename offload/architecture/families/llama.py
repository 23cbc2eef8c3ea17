"""Llama, and models published in its format, such as Yi, SmolLM2 and LWM."""

from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values


def _layers(values: Values) -> list[LayerSpec]:
    bias = values["attention_bias"]
    return [LayerSpec(qkv_bias=bias, o_bias=bias, mlp_bias=values["mlp_bias"])]


LLAMA = Family(
    "llama",
    _layers,
    {"max_position_embeddings": 2048, "eos_token_id": 2},
    gguf=GGUFNames(  # Mistral's, too
        "llama", keys={"sliding_window": "attention.sliding_window"}, permutes=True, sparse="mixtral"
    ),
)
