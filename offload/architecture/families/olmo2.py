"""OLMo 2: norms behind attention and MLP in place of before, and norms of q and k over all heads together."""

from ..layer_spec import LayerSpec
from .family import GENERIC_TOKENIZER, Family, GGUFNames, Values


def _layers(values: Values) -> list[LayerSpec]:
    bias = values["attention_bias"]
    return [LayerSpec(qkv_bias=bias, o_bias=bias, qk_norm="projection", pre_norms=False, post_norms=True)]


OLMO2 = Family(
    "olmo2",
    _layers,
    {
        "vocab_size": 50304,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    tensors={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    tokenizer=GENERIC_TOKENIZER,
    gguf=GGUFNames(
        "olmo2",
        {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        reads_tokenizer=True,
    ),
)
