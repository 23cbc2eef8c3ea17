"""The bits of a checkpoint's weights: of layers, of experts in them, and of what is outside."""

from offload.architecture.dims import WeightBits
from offload.loading.formats.tensor_checks import average_bits

SIZES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 12),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.mlp.experts.3.up_proj.weight": (8, 4),
}


def test_experts_are_counted_apart_where_they_have_other_bits():
    quantized = {"model.layers.0.mlp.experts.3.up_proj.weight": 4.5, "model.layers.0.self_attn.q_proj.weight": 8.0}
    assert average_bits(SIZES, quantized, 2) == WeightBits(14.0, 16.0, 4.5)
    assert average_bits(SIZES, {}, 2) == WeightBits(16.0, 16.0)
