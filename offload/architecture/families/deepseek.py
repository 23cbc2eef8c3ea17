"""DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash: multi-head latent attention, and a mixture of experts as in GLM-4.5."""

import math
from dataclasses import replace
from typing import Any

from ...errors import UnsupportedModel
from ..layer_spec import Latent, LayerSpec
from .family import STACKED_EXPERTS, Family, GGUFNames, Values, layer_specs
from .glm4 import ROUTED, ROUTED_ALIASES, ROUTED_KEYS, ROUTED_TENSORS, routed


def _latent(values: Values) -> Latent:
    rotated, rank = values["qk_rope_head_dim"], values["kv_lora_rank"]
    plain = values["qk_nope_head_dim"] or values.get("qk_head_dim", 0) - rotated
    if plain < 1 or rank % 2 or rotated % 2:
        sizes = f"{rank} numbers, {plain} plain and {rotated} rotated ones of a query"
        raise UnsupportedModel(f"latent attention with latents of {sizes} is not supported", "correct the config")
    return Latent(values["q_lora_rank"] or 0, rank, plain, rotated, values["v_head_dim"])


def _layers(values: Values) -> list[LayerSpec]:
    sizes = _latent(values)
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    all_dims = rope.get("mscale_all_dim") or 0
    mscale = 0.1 * all_dims * math.log(rope["factor"]) + 1 if all_dims and (rope.get("factor") or 1) > 1 else 1.0
    scale = (sizes.plain + sizes.rotated) ** -0.5 * mscale**2
    return layer_specs(values, is_latent=True, query_scale=scale, **routed(values))


def _heads(values: Values) -> dict[str, Any]:
    return {"kv_heads": 1, "head_dim": _latent(values).head_dim}


def _features(values: Values) -> dict[str, Any]:
    return {"latent": _latent(values), "rotates_neighbours": values["rope_interleave"] is not False}


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _layers,
    {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
    | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128}
    | ROUTED
    | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "rope_interleave": True, "eos_token_id": 1}
    | {"max_position_embeddings": 4096},
    aliases=ROUTED_ALIASES,
    heads=_heads,
    features=_features,
    tensors=ROUTED_TENSORS,
    stacked=STACKED_EXPERTS,
    gguf=GGUFNames(
        "deepseek2",
        ROUTED_KEYS
        | {
            "kv_lora_rank": "attention.kv_lora_rank",
            "q_lora_rank": "attention.q_lora_rank",
            "qk_head_dim": "attention.key_length_mla",
            "v_head_dim": "attention.value_length_mla",
            "qk_rope_head_dim": "rope.dimension_count",
        },
        left_out={
            "qk_nope_head_dim": None,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "expert_gating_func": 1,
        },
    ),
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    defaults=DEEPSEEK_V3.defaults
    | {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1}
    | {"q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
    gguf=None,
)
