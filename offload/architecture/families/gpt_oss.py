"""gpt-oss: a mixture of experts, attention sinks, and a window in every other layer."""

from ...errors import UnsupportedModel
from ..layer_spec import LayerSpec
from .family import Family, GGUFNames, Values, layer_specs

_ALPHA = 1.702  # of the gate, as LayerSpec.swiglu_limit has it
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _layers(values: Values) -> list[LayerSpec]:
    if values.get("swiglu_alpha", _ALPHA) != _ALPHA:
        raise UnsupportedModel(f"gpt-oss with another swiglu_alpha than {_ALPHA} is not supported", "use one with it")
    limit = values["swiglu_limit"]
    return layer_specs(values, 2, mlp_bias=True, router="chosen", router_bias=True, swiglu_limit=limit, has_sinks=True)


GPT_OSS = Family(
    "gpt_oss",
    _layers,
    {"head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0}
    | {"num_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0}
    | {"rope_parameters": _YARN | {"original_max_position_embeddings": 4096}},
    aliases={"num_experts": "num_local_experts"},
    has_layer_windows=True,
    tensors={"mlp.gate": "mlp.router"},
    stacked={
        "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        "mlp.experts.gate_up_proj_bias": ("mlp.experts.*.gate_proj.bias", "mlp.experts.*.up_proj.bias"),
        "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
        "mlp.experts.down_proj_bias": ("mlp.experts.*.down_proj.bias",),
    },
    transposes_experts=True,
    interleaves_experts=True,
    gguf=GGUFNames("gpt-oss", yarn={"truncate": False}),
)
