"""GLM-4: norms before and behind attention and MLP, RoPE on neighbours in a half of each head, a fused MLP.

GLM-4.5 to 4.7 are mixtures of experts as DeepSeek-V3 has them, with norms of q and k in the large ones.
"""

from typing import Any

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import FUSED_MLP, STACKED_EXPERTS, Family, GGUFNames, Values, layer_specs

GLM4 = Family(
    "glm4",
    lambda values: [LayerSpec(qkv_bias=values["attention_bias"], post_norms=True)],
    {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5}
    | {"eos_token_id": [151329, 151336, 151338]},
    has_partial_rope=True,
    features=lambda values: {"rotates_neighbours": True},
    fused=FUSED_MLP,
    gguf=GGUFNames("glm4"),
)


def routed(values: Values) -> dict[str, Any]:
    """Return the features of a layer whose experts are chosen by sigmoids. Raises UnsupportedModel."""
    is_sigmoid = values.get("scoring_func", "sigmoid") == "sigmoid" and values.get("expert_gating_func", 2) == 2
    if not (is_sigmoid and values["norm_topk_prob"]):
        raise UnsupportedModel(
            "experts that are not weighed by sigmoids with a sum of 1 are not supported", "use another"
        )
    groups, count = (values["n_group"] or 1, values["topk_group"] or 1), values["num_experts"]
    if count % groups[0] or groups[1] > groups[0] or (groups[0] > 1 and count // groups[0] < 2):
        raise UnsupportedModel(
            f"{count} experts in {groups[0]} groups, of which {groups[1]} are used", "correct config.json"
        )
    scale, shares = values["routed_scaling_factor"], bool(values["n_shared_experts"])
    shared = {"shares_expert": shares, "gates_shared_expert": False}
    return {"router": "sigmoid", "router_scale": scale, "router_groups": groups} | shared


def _layers(values: Values) -> list[LayerSpec]:
    qk_norm = "head" if values["use_qk_norm"] else ""
    return layer_specs(values, o_bias=False, qk_norm=qk_norm, **routed(values))


ROUTED = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
ROUTED_ALIASES = {"num_experts": "n_routed_experts"}
ROUTED_TENSORS = {f"mlp.shared_expert.{x}_proj": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
ROUTED_KEYS = {
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "expert_gating_func": "expert_gating_func",
    "num_nextn_predict_layers": "nextn_predict_layers",
}
GLM4_MOE = Family(
    "glm4_moe",
    _layers,
    {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
    | ROUTED
    | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False},
    aliases=ROUTED_ALIASES,
    has_partial_rope=True,
    tensors=ROUTED_TENSORS,
    stacked=STACKED_EXPERTS,
    gguf=GGUFNames("glm4moe", ROUTED_KEYS),
)
