"""Mistral and Mistral-Nemo."""

from ..layer_spec import LayerSpec
from .family import GENERIC_TOKENIZER, Family

MISTRAL = Family(
    "mistral",
    lambda values: [LayerSpec(qkv_bias=values["attention_bias"])],
    {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    tokenizer=GENERIC_TOKENIZER,
)
