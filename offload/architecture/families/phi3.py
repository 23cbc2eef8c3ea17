"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused tensors, and RoPE on a part of each head in the mini."""

from ..layer_spec import LayerSpec
from .family import FUSED_MLP, FUSED_QKV, Family, GGUFNames

PHI3 = Family(
    "phi3",
    lambda values: [LayerSpec()],
    {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000}
    | {"partial_rotary_factor": 1.0},
    rope_types={"su": "longrope", "yarn": "longrope"},
    only_rope=("default", "longrope"),  # as in transformers
    has_partial_rope=True,
    fused=FUSED_QKV | FUSED_MLP,
    gguf=GGUFNames("phi3", {"sliding_window": "attention.sliding_window"}),
)
