"""The limits of the numbers in a model's config: one table for config.json and GGUF metadata.

A value outside them would end in a crash, a long wait or wrong output. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..units import MOST_TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers from `least` to `most`, both included; only whole numbers if `kind` is int."""

    kind: type[int] | type[float]
    least: float
    most: float
    example: float
    null: bool = False  # whether null is allowed, and means a default

    def allow(self, value: Any) -> bool:
        """Return whether a config's value is within the limits. NaN and booleans are not."""
        if value is None:
            return self.null
        return type(value) in (int, self.kind) and self.least <= value <= self.most

    @property
    def example_text(self) -> str:
        """Return the example, formatted."""
        return _text(self.example)

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} from {_text(self.least)} to {_text(self.most)}"


NUMBERS = {
    "num_hidden_layers": Limits(int, 1, 10_000, 32),
    "hidden_size": Limits(int, 1, 2**20, 4096),
    "intermediate_size": Limits(int, 1, 2**24, 11008),
    "num_attention_heads": Limits(int, 1, 2**16, 32),
    "num_key_value_heads": Limits(int, 1, 2**16, 8, null=True),
    "head_dim": Limits(int, 2, 2**16, 128, null=True),
    "vocab_size": Limits(int, 1, 2**28, 32000),
    "max_position_embeddings": Limits(int, 1, MOST_TOKENS, 4096),
    "sliding_window": Limits(int, 1, MOST_TOKENS, 4096, null=True),
    "rms_norm_eps": Limits(float, 1e-30, 1, 1e-5),  # fp32 cannot represent numbers below 1e-38
    "embedding_multiplier": Limits(float, 1e-6, 1e6, 12),
    "attention_multiplier": Limits(float, 1e-6, 1e6, 0.015625),
    "residual_multiplier": Limits(float, 1e-6, 1e6, 0.22),
    "logits_scaling": Limits(float, 1e-6, 1e6, 8),
    "logit_scale": Limits(float, 1e-6, 1e6, 0.0625),
    "query_pre_attn_scalar": Limits(float, 1e-3, 1e6, 256, null=True),
    "attn_logit_softcapping": Limits(float, 1e-3, 1e6, 50, null=True),
    "final_logit_softcapping": Limits(float, 1e-3, 1e6, 30, null=True),
    "rope_local_base_freq": Limits(float, 2, 1e30, 10000),
    "sliding_window_pattern": Limits(int, 1, 10_000, 6, null=True),
    "no_rope_layer_interval": Limits(int, 1, 10_000, 4),
    "num_experts": Limits(int, 0, 2**16, 128),
    "num_experts_per_tok": Limits(int, 1, 2**16, 8),
    "moe_intermediate_size": Limits(int, 1, 2**24, 768),
    "decoder_sparse_step": Limits(int, 1, 10_000, 1),
    "global_head_dim": Limits(int, 2, 2**16, 512),
    "num_global_key_value_heads": Limits(int, 1, 2**16, 4, null=True),
    "num_kv_shared_layers": Limits(int, 0, 10_000, 18),
    "hidden_size_per_layer_input": Limits(int, 0, 2**16, 256, null=True),
    "vocab_size_per_layer_input": Limits(int, 1, 2**28, 262144),
    "swiglu_limit": Limits(float, 1e-3, 1e6, 7),
    "shared_expert_intermediate_size": Limits(int, 1, 2**24, 512),
    "full_attention_interval": Limits(int, 1, 10_000, 4),
    "linear_conv_kernel_dim": Limits(int, 2, 64, 4),
    "linear_key_head_dim": Limits(int, 1, 2**16, 128),
    "linear_value_head_dim": Limits(int, 1, 2**16, 128),
    "linear_num_key_heads": Limits(int, 1, 2**16, 16),
    "linear_num_value_heads": Limits(int, 1, 2**16, 32),
}
OF_EXPERTS = ("num_experts", "moe_intermediate_size")
ROPE_NUMBERS = {
    "rope_theta": Limits(float, 2, 1e30, 10000),
    "factor": Limits(float, 1, 2**20, 4),
    "original_max_position_embeddings": Limits(float, 2, MOST_TOKENS, 8192),
    "low_freq_factor": Limits(float, 1e-3, 1e6, 1),
    "high_freq_factor": Limits(float, 1e-3, 1e6, 4),
    "beta_fast": Limits(float, 1e-3, 1e6, 32, null=True),
    "beta_slow": Limits(float, 1e-3, 1e6, 1, null=True),
    "attention_factor": Limits(float, 1e-3, 1e3, 1, null=True),
    "llama_4_scaling_beta": Limits(float, 0, 1e3, 0.1),
    "mscale": Limits(float, 0, 1e3, 1, null=True),
    "mscale_all_dim": Limits(float, 0, 1e3, 1, null=True),
    "partial_rotary_factor": Limits(float, 0, 1, 1),
}
SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("norm_topk_prob", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
)
DIVISOR = Limits(float, 1e-3, 1e6, 1)  # in the lists of longrope
ROPE_LISTS = ("short_factor", "long_factor")
EVERY_ROPE = ("rope_theta", "partial_rotary_factor")
OF_ROPE_TYPE = {  # the parameters that transformers reads, and those that it requires
    "linear": (("factor",), ("factor",)),
    "dynamic": (("factor",), ("factor",)),
    "yarn": (
        (
            *("factor", "original_max_position_embeddings", "beta_slow", "beta_fast"),
            *("attention_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta"),
        ),
        ("factor",),
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        ("factor", "low_freq_factor", "high_freq_factor"),
    ),
    "longrope": (("factor", "original_max_position_embeddings", "attention_factor", *ROPE_LISTS), ROPE_LISTS),
}
QUERY_SCALING = ("llama_4_scaling_beta", "original_max_position_embeddings")
RATIO_TYPES = ("yarn", "longrope")  # types whose factor may be null: the ratio of two contexts
ASCENDING = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


def _text(number: float) -> str:
    """Format a limit for an error message."""
    return f"{number:,}" if isinstance(number, int) and number < 10**13 else f"{number:g}"
