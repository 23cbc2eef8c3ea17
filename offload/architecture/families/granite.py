"""Granite 3, and with experts: Llama with multipliers of embedding, attention scores, residuals and logits."""

from dataclasses import replace
from typing import Any

from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values, layer_specs


def _layers(values: Values) -> list[LayerSpec]:
    head_dim = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    scales = {"query_scale": values["attention_multiplier"] * head_dim**0.5}
    return layer_specs(
        values, mlp_bias=values["mlp_bias"], router="chosen", residual_scale=values["residual_multiplier"], **scales
    )


def _features(values: Values) -> dict[str, Any]:
    return {"embedding_scale": values["embedding_multiplier"], "logit_scale": 1 / values["logits_scaling"]}


_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
}
GRANITE = Family(
    "granite",
    _layers,
    {"eos_token_id": 2} | dict.fromkeys(_KEYS, 1.0),
    features=_features,
    # llama.cpp reads rope.scaling.finetuned as whether there is RoPE.
    gguf=GGUFNames("granite", _KEYS, permutes=True, switches=("rope.scaling.finetuned",)),
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
    gguf=GGUFNames("granitemoe", _KEYS, permutes=True, switches=("rope.scaling.finetuned",)),
)
