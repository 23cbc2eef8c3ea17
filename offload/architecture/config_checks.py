"""Checks the numbers in a model's config before anything is computed from them. Imports nothing heavy.

One table of limits serves config.json and GGUF metadata: a value outside them would end in a crash, a long wait or
wrong output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError
from ..short_repr import short_repr
from ..units import MOST_TOKENS
from .families import FAMILIES


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

    def __str__(self) -> str:
        return f"{'a whole number' if self.kind is int else 'a number'} from {self.least:,} to {self.most:,}"


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
    "pard_token": Limits(int, 0, 2**28, 128002, null=True),
}
OF_EXPERTS = ("num_experts", "moe_intermediate_size")
SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("norm_topk_prob", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
)


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """The checks of one file: `place` is its name, and `hint` what the user can do about an error."""

    place: str
    hint: str

    def check(self, values: Mapping[str, Any]) -> None:
        """Check a config's numbers, flags, token ids and lists, under transformers' names; its family is known.

        Absent values are not checked: they have defaults. Raises CheckpointError with the name, the value and the
        values that are allowed.
        """
        window, family = window_in_use(values), FAMILIES[values["model_type"]]
        for name, limits in NUMBERS.items():
            is_unused = name == "sliding_window" and window is None
            if name in OF_EXPERTS and values.get(name) is None:  # other families may have null
                is_unused = "num_experts" not in family.defaults
            if name in values and not is_unused:
                self.number(name, values[name], replace(limits, null=limits.null and name not in family.not_null))
        for name in SWITCHES:
            if not isinstance(values.get(name, False), bool):
                raise self.error(name, values[name], "true or false")
        self.token_ids(values.get("eos_token_id"))
        layers = values.get("num_hidden_layers", 0)
        for name, allowed, least in (
            ("no_rope_layers", (0, 1), layers),
            ("layer_types", family.layer_kinds, layers),
            ("mlp_only_layers", range(10_000), 0),
        ):
            found = values.get(name)
            is_list = isinstance(found, list) and len(found) >= least and all(each in allowed for each in found)
            if found is not None and allowed and not is_list:
                shown = f"of {' or '.join(map(str, allowed))} for every layer" if least else "of layers' numbers"
                raise self.error(name, found, f"a list {shown}")

    def number(self, name: str, value: Any, limits: Limits) -> None:
        """Raise CheckpointError if a value is not within the limits."""
        if not limits.allow(value):
            raise self.error(name, value, f"{limits}, such as {limits.example:,}")

    def error(self, name: str, value: Any, wanted: str) -> CheckpointError:
        """Return the error for one value; `wanted` completes "not ..."."""
        return CheckpointError(f"{self.place}: {name} is {short_repr(value)}, not {wanted}", self.hint)

    def heads(self, values: Mapping[str, Any]) -> None:
        """Check that the numbers of heads and the head dimension are consistent. Raises CheckpointError."""
        heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads")
        if kv_heads and heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
        head_dim = values.get("head_dim")
        if head_dim is None and (values["model_type"] == "llama" and values["hidden_size"] % heads):
            raise self.error("num_attention_heads", heads, f"a divisor of the hidden size of {values['hidden_size']}")
        for each in (head_dim or values["hidden_size"] // heads, values.get("global_head_dim") or 2):
            if each < 2 or each % 2:
                raise self.error("head_dim", each, "an even number: RoPE turns pairs")

    def token_ids(self, value: Any) -> tuple[int, ...]:
        """Return the token ids in a config's value, which is null, one id or a list. Raises CheckpointError."""
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
            raise self.error("eos_token_id", value, "a token id, or a list of them")
        return tuple(ids)


def window_in_use(values: Mapping[str, Any]) -> Any:
    """Return a config's sliding window, or None if the model does not use it, as in most of Qwen's configs."""
    is_optional = FAMILIES[values["model_type"]].has_optional_window
    return None if is_optional and not values.get("use_sliding_window") else values.get("sliding_window")


def check_of_config(place: Any) -> ConfigCheck:
    """Return the checks of a config.json."""
    return ConfigCheck(str(place), "correct it there, or fetch the model again")


def within_vocabulary(ids: Iterable[int], vocab: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids that are in the vocabulary, each once.

    Fine-tuned models may inherit ids outside their vocabulary beside valid ones; these are ignored. Raises
    CheckpointError if there are ids but none is in the vocabulary: no answer would ever end.
    """
    unique = tuple(dict.fromkeys(ids))
    inside = tuple(token for token in unique if token < vocab)
    if unique and not inside:
        raise CheckpointError(
            f"eos_token_id is {short_repr(unique[0])}, and the vocabulary has {vocab:,} tokens",
            "correct eos_token_id in the model's configuration",
        )
    return inside
