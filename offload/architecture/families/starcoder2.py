"""StarCoder2: LayerNorm, an MLP without a gate, and biases."""

from ..layer_spec import LayerSpec, activation_of
from .family import Family, GGUFNames, Values, layer_specs


def _layers(values: Values) -> list[LayerSpec]:
    activation, bias = activation_of(values["hidden_act"]), values["attention_bias"]
    return layer_specs(values, mlp_bias=bias, norm="layer", norm_bias=True, activation=activation, is_gated=False)


STARCODER2 = Family(
    "starcoder2",
    _layers,
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
