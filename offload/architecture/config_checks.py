"""Checks the numbers in a model's config before anything is computed from them. Imports nothing heavy.

One table of limits serves config.json and GGUF metadata: a value outside them would end in a crash, a long wait or
wrong output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..short_repr import short_repr
from ..units import MOST_TOKENS
from .families import FAMILIES
from .layer_spec import SLIDING


class Limits(NamedTuple):
    """The numbers from `least` to `most`, both included; only whole numbers if `kind` is int."""

    kind: type[int] | type[float]
    least: float
    most: float

    def allow(self, value: Any) -> bool:
        """Return whether a config's value is within the limits. NaN and booleans are not."""
        return type(value) in (int, self.kind) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{'a whole number' if self.kind is int else 'a number'} from {self.least:,} to {self.most:,}"


TOKENS, FACTOR, BASE = Limits(int, 1, MOST_TOKENS), Limits(float, 1e-6, 1e6), Limits(float, 2, 1e30)
_EVERY = Limits(int, 1, 10_000)  # layers, and periods of kinds of layers
_WIDTH, _VOCABULARY = Limits(int, 1, 2**24), Limits(int, 1, 2**28)
_HEADS, _HEAD_DIM = Limits(int, 1, 2**16), Limits(int, 2, 2**16)
_LIMITS = {
    _EVERY: "num_hidden_layers sliding_window_pattern no_rope_layer_interval decoder_sparse_step"
    " full_attention_interval",
    Limits(int, 0, 10_000): "num_kv_shared_layers",
    _WIDTH: "hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size",
    _HEADS: "num_attention_heads num_key_value_heads num_global_key_value_heads num_experts_per_tok"
    " linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"
    " n_group topk_group qk_nope_head_dim qk_head_dim v_head_dim kv_lora_rank q_lora_rank",
    Limits(int, 0, 2**16): "num_experts hidden_size_per_layer_input n_shared_experts first_k_dense_replace",
    _HEAD_DIM: "head_dim global_head_dim qk_rope_head_dim",
    Limits(int, 2, 64): "linear_conv_kernel_dim",
    _VOCABULARY: "vocab_size vocab_size_per_layer_input",
    TOKENS: "max_position_embeddings sliding_window",
    Limits(float, 1e-30, 1): "rms_norm_eps",  # fp32 cannot represent numbers below 1e-38
    FACTOR: "embedding_multiplier attention_multiplier residual_multiplier logits_scaling logit_scale swiglu_limit"
    " routed_scaling_factor query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping",
    BASE: "rope_local_base_freq",
}
_NULLABLE = {  # null means a default
    *("num_key_value_heads", "head_dim", "sliding_window", "sliding_window_pattern", "num_global_key_value_heads"),
    *("n_group", "topk_group", "qk_nope_head_dim", "q_lora_rank", "n_shared_experts"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_size_per_layer_input"),
}
_SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("norm_topk_prob", "rope_interleave", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
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
        family, unused = FAMILIES[values["model_type"]], set()
        if window_in_use(values) is None:
            unused.add("sliding_window")
        if "num_experts" not in family.defaults:  # other families may have null
            unused |= {name for name in ("num_experts", "moe_intermediate_size") if values.get(name) is None}
        nullable = _NULLABLE - set(family.not_null)
        self.numbers({name: value for name, value in values.items() if name not in unused}, _LIMITS, nullable)
        for name in _SWITCHES:
            if not isinstance(values.get(name, False), bool):
                raise self.error(name, values[name], "true or false")
        self.token_ids(values.get("eos_token_id"))
        layers = values["num_hidden_layers"]
        self._list(values, "no_rope_layers", (0, 1), layers)
        self._list(values, "layer_types", family.layer_kinds, layers)
        self._list(values, "mlp_only_layers", range(10_000), 0)
        self._list(values, "mlp_layer_types", ("dense", "sparse"), layers)

    def numbers(self, values: Mapping[str, Any], limits: Mapping[Limits, str], nullable: Iterable[str]) -> None:
        """Check the numbers of a config whose names a table has, each behind its limits. Raises CheckpointError."""
        for own, names in limits.items():
            for name in names.split():
                if name in values and not (own.allow(values[name]) or (values[name] is None and name in nullable)):
                    raise self.error(name, values[name], str(own))

    def _list(self, values: Mapping[str, Any], name: str, allowed: Iterable[Any], least: int) -> None:
        """Check a list of at least so many values that are allowed; where none are, the list is not read."""
        value = values.get(name)
        is_list = isinstance(value, list) and len(value) >= least and all(item in allowed for item in value)
        if value is not None and allowed and not is_list:
            shown = f"of {' or '.join(map(str, allowed))} for every layer" if least else "of layers' numbers"
            raise self.error(name, value, f"a list {shown}")

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
        for dims in (head_dim or values["hidden_size"] // heads, values.get("global_head_dim") or 2):
            if dims < 2 or dims % 2:
                raise self.error("head_dim", dims, "an even number: RoPE turns pairs")

    def token_ids(self, value: Any) -> tuple[int, ...]:
        """Return the token ids in a config's value, which is null, one id or a list. Raises CheckpointError."""
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
            raise self.error("eos_token_id", value, "a token id, or a list of them")
        return tuple(ids)

    def end_ids(self, values: Iterable[Any], vocab: int) -> tuple[int, ...]:
        """Return the end-of-sequence ids of several configs that are in the vocabulary, each once.

        Fine-tuned models may inherit ids outside their vocabulary beside valid ones; these are ignored. Raises
        CheckpointError if there are ids but none is in the vocabulary: no answer would ever end.
        """
        unique = tuple(dict.fromkeys(token for value in values for token in self.token_ids(value)))
        inside = tuple(token for token in unique if token < vocab)
        if unique and not inside:
            raise CheckpointError(
                f"eos_token_id is {short_repr(unique[0])}, and the vocabulary has {vocab:,} tokens",
                "correct eos_token_id in the model's configuration",
            )
        return inside


def window_in_use(values: Mapping[str, Any]) -> Any:
    """Return a config's sliding window, or None if no layer uses it, as in most of Qwen's configs."""
    if FAMILIES[values["model_type"]].has_optional_window:
        kinds, first = values.get("layer_types"), values.get("max_window_layers", 28)  # Qwen's default
        counts = (values["num_hidden_layers"], first)
        starts_behind = all(type(count) is int for count in counts) and counts[0] <= counts[1]
        if not values.get("use_sliding_window") or (SLIDING not in kinds if isinstance(kinds, list) else starts_behind):
            return None
    return values.get("sliding_window")


def check_of_config(place: Any) -> ConfigCheck:
    """Return the checks of a config.json."""
    return ConfigCheck(str(place), "correct it there, or fetch the model again")
