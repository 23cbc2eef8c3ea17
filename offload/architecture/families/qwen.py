"""Qwen2, Qwen2.5 and dense Qwen3."""

from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values

_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}


def _qwen3(values: Values) -> list[LayerSpec]:
    bias = values["attention_bias"]
    return [LayerSpec(qkv_bias=bias, o_bias=bias, qk_norm="head")]


QWEN2 = Family(
    "qwen2",
    lambda values: [LayerSpec(qkv_bias=True)],
    _DEFAULTS,
    has_optional_window=True,
    tokenizer="Qwen2Tokenizer",
    gguf=GGUFNames("qwen2"),
)
QWEN3 = Family(
    "qwen3",
    _qwen3,
    _DEFAULTS | {"head_dim": 128},
    has_optional_window=True,
    unnamed_tokenizer="Qwen2Tokenizer",
    gguf=GGUFNames("qwen3", {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
)
