"""Qwen2, Qwen2.5 and Qwen3, dense and with a mixture of experts (Qwen3-30B-A3B, Qwen3-Coder)."""

from ..layer_spec import LayerSpec
from .family import GGUF_EXPERT_TENSORS, GGUF_EXPERTS, GGUF_QK_NORMS, Family, GGUFNames, Values

_DEFAULTS = {"sliding_window": 4096}


def _qwen3(values: Values) -> list[LayerSpec]:
    bias = values["attention_bias"]
    return [LayerSpec(qkv_bias=bias, o_bias=bias, qk_norm="head")]


QWEN2 = Family(
    "qwen2", lambda values: [LayerSpec(qkv_bias=True)], _DEFAULTS, has_optional_window=True, gguf=GGUFNames("qwen2")
)
QWEN3 = Family(
    "qwen3",
    _qwen3,
    _DEFAULTS | {"head_dim": 128},
    has_optional_window=True,
    gguf=GGUFNames("qwen3", GGUF_QK_NORMS),
)


def _layers(values: Values) -> list[LayerSpec]:
    bias, dense = values["attention_bias"], values["mlp_only_layers"] or ()
    router = "chosen" if values["norm_topk_prob"] else "all"
    period = values["num_experts"] and values["decoder_sparse_step"]  # of sparse layers; 0 without experts
    return [
        LayerSpec(
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            router=router if layer not in dense and period and (layer + 1) % period == 0 else "",
        )
        for layer in range(values["num_hidden_layers"])
    ]


QWEN3_MOE = Family(
    "qwen3_moe",
    _layers,
    {
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    aliases={"num_experts": "num_local_experts"},  # in files of transformers 5; others have both names
    has_optional_window=True,
    gguf=GGUFNames(
        "qwen3moe",
        GGUF_QK_NORMS | {"ffn_gate_inp": "mlp.gate"} | GGUF_EXPERT_TENSORS,
        GGUF_EXPERTS | {"moe_intermediate_size": "expert_feed_forward_length"},
        left_out={"norm_topk_prob": True},
    ),
)
