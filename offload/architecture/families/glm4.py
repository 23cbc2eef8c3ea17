"""GLM-4: norms before and behind attention and MLP, RoPE on neighbours in a half of each head, a fused MLP."""

from ..layer_spec import LayerSpec
from .family import FUSED_MLP, Family, GGUFNames

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
