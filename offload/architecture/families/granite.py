"""Granite 3, and with experts: Llama with multipliers of embedding, attention scores, residuals and logits."""

from dataclasses import replace
from typing import Any

from ..layer_spec import LayerSpec
from .family import GGUF_EXPERT_TENSORS, GGUF_EXPERTS, Family, GGUFNames, Values


def _layers(values: Values) -> list[LayerSpec]:
    bias = values["attention_bias"]
    head_dim = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    return [
        LayerSpec(
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=values["mlp_bias"],
            router="chosen" if values.get("num_experts") else "",
            query_scale=values["attention_multiplier"] * head_dim**0.5,
            residual_scale=values["residual_multiplier"],
        )
    ]


def _features(values: Values) -> dict[str, Any]:
    return {"embedding_scale": values["embedding_multiplier"], "logit_scale": 1 / values["logits_scaling"]}


_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
}
_GGUF = GGUFNames(
    "granite",
    keys=_KEYS,
    permutes=True,
    switches=("rope.scaling.finetuned",),  # which llama.cpp reads as whether there is RoPE
)
GRANITE = Family(
    "granite",
    _layers,
    {
        "eos_token_id": 2,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    features=_features,
    gguf=_GGUF,
)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    defaults=GRANITE.defaults | {"num_experts": 8, "num_experts_per_tok": 2},
    aliases={"num_experts": "num_local_experts"},
    tensors={"mlp.gate": "block_sparse_moe.router.layer"},
    stacked={
        "block_sparse_moe.input_linear.weight": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        "block_sparse_moe.output_linear.weight": ("mlp.experts.*.down_proj.weight",),
    },
    gguf=replace(
        _GGUF,
        architecture="granitemoe",
        tensors={"ffn_gate_inp": "block_sparse_moe.router.layer"} | GGUF_EXPERT_TENSORS,
        keys=_KEYS | GGUF_EXPERTS,
    ),
)
