"""Checks the numbers in a model's config before anything is computed from them.

One table of limits serves config.json and GGUF metadata. A value outside them would end in a crash, a long wait or
wrong output. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError
from ..short_repr import short_repr
from ..units import MOST_TOKENS
from .families import FAMILIES, Family
from .layer_spec import FULL, SLIDING

_MOST_IDS = 2**32


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
_OF_EXPERTS = ("num_experts", "moe_intermediate_size")
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
_SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("norm_topk_prob", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
)
_DIVISOR = Limits(float, 1e-3, 1e6, 1)  # in the lists of longrope
_BITS = (0, 1)
_LISTS = ("short_factor", "long_factor")
_EVERY_ROPE = ("rope_theta", "partial_rotary_factor")
_OF_ROPE_TYPE = {  # the parameters that transformers reads, and those that it requires
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
    "longrope": (("factor", "original_max_position_embeddings", "attention_factor", *_LISTS), _LISTS),
}
_RATIO_TYPES = ("yarn", "longrope")  # types whose factor may be null: the ratio of two contexts
_ASCENDING = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """The checks of one file.

    Attributes:
        place: the file's name, for error messages.
        names: the file's own names of the values, by transformers' names.
        hint: what the user can do about an error.
    """

    place: str
    names: Mapping[str, str]
    hint: str

    def naming(self, names: Mapping[str, str]) -> ConfigCheck:
        """Return the same checks for a file that has its own `names`, too, of some values."""
        return replace(self, names={**names, **self.names})

    def check(self, values: Mapping[str, Any]) -> None:
        """Check a config's numbers, flags, token ids, heads and RoPE, under transformers' names.

        Absent values are not checked: they have defaults. Raises CheckpointError with the name, the value and the
        values that are allowed.
        """
        window, family = window_in_use(values), _family(values)
        for name, limits in NUMBERS.items():
            is_unused = name == "sliding_window" and window is None
            if name in _OF_EXPERTS and values.get(name) is None:  # other families may have null
                is_unused = family is not None and "num_experts" not in family.defaults
            if name in values and not is_unused:
                self._number(name, values[name], limits)
        for name in _SWITCHES:
            if name in values and not isinstance(values[name], bool):
                raise self.error(name, values[name], "true or false")
        self.token_ids(values.get("eos_token_id"))
        self.heads(values)
        self._flags("no_rope_layers", values)
        self._numbers_of_layers("mlp_only_layers", values)
        self._layer_types(values)
        self._per_layer_config(values)
        self._rope(self.rope_of(values))
        if sliding := self.sliding_rope_of(values):
            self._rope(sliding)

    def _number(self, name: str, value: Any, limits: Limits) -> None:
        """Raise CheckpointError if a value is not within the limits."""
        if not limits.allow(value):
            raise self.error(name, value, str(limits), f", such as {_text(limits.example)}")

    def error(self, name: str, value: Any, wanted: str, example: str = "") -> CheckpointError:
        """Return the error for one value; `wanted` completes "not ..."."""
        message = f"{self.place}: {self.names.get(name, name)} is {short_repr(value)}, not {wanted}{example}"
        return CheckpointError(message, self.hint)

    def heads(self, values: Mapping[str, Any]) -> None:
        """Check that the numbers of heads and the head dimension are consistent. Raises CheckpointError."""
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        kv_heads, head_dim = values.get("num_key_value_heads"), values.get("head_dim")
        if heads and kv_heads and heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
        if head_dim is None and heads and hidden:
            head_dim = hidden // heads
            if head_dim < 2:
                raise self.error("num_attention_heads", heads, f"at most half of the hidden size of {hidden}")
        if head_dim and head_dim % 2:
            raise self.error("head_dim", head_dim, "an even number: RoPE turns pairs")

    def _rope(self, rope: Mapping[str, Any]) -> None:
        """Check the merged RoPE parameters that the RoPE type reads."""
        kind = rope.get("rope_type")
        read, required = _OF_ROPE_TYPE.get(kind if isinstance(kind, str) else "", ((), ()))
        for name in required:
            if name not in rope:
                raise CheckpointError(f"{self.place}: RoPE {kind} without {name}", self.hint)
        for name in (*_EVERY_ROPE, *read):
            if name not in rope or (name == "factor" and rope[name] is None and kind in _RATIO_TYPES):
                continue
            if name in _LISTS:
                self._divisors(name, rope[name])
            else:
                self._number(name, rope[name], ROPE_NUMBERS[name])
        if kind == "yarn" and not isinstance(rope.get("truncate", True), bool):
            raise self.error("truncate", rope["truncate"], "true or false")
        for lower, higher in _ASCENDING:
            first, second = rope.get(lower), rope.get(higher)
            if lower in read and first is not None and second is not None and first >= second:
                raise self.error(lower, first, f"below {self.names.get(higher, higher)}, which is {short_repr(second)}")

    def _flags(self, name: str, values: Mapping[str, Any]) -> None:
        """Check a list with 0 or 1 for every layer, or null."""
        flags, layers = values.get(name), values.get("num_hidden_layers", 0)
        if flags is not None and not (
            isinstance(flags, list)
            and len(flags) >= layers
            and all(type(flag) is int and flag in _BITS for flag in flags)
        ):
            raise self.error(name, flags, "a list with 0 or 1 for every layer")

    def _numbers_of_layers(self, name: str, values: Mapping[str, Any]) -> None:
        """Check a list of layers, by their numbers, or null."""
        numbers = values.get(name)
        if numbers is not None and not (
            isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
        ):
            raise self.error(name, numbers, "a list of layers' numbers")

    def _layer_types(self, values: Mapping[str, Any]) -> None:
        """Check the list of each layer's kind, or null, where a family reads it."""
        kinds, family = values.get("layer_types"), _family(values)
        if kinds is None or family is None or not family.layer_kinds:
            return
        is_list = isinstance(kinds, list) and len(kinds) >= values.get("num_hidden_layers", 0)
        if not is_list or any(kind not in family.layer_kinds for kind in kinds):
            raise self.error("layer_types", kinds, f"a list with {' or '.join(family.layer_kinds)} for every layer")

    def _per_layer_config(self, values: Mapping[str, Any]) -> None:
        """Check values of single layers, by the layers' numbers, or null."""
        name = "per_layer_config"
        by_layer = values.get(name)
        if by_layer is None:
            return
        is_mapping = isinstance(by_layer, Mapping) and all(str(layer).isdecimal() for layer in by_layer)
        if not is_mapping or not all(isinstance(own, Mapping) for own in by_layer.values()):
            raise self.error(name, by_layer, "values by the layers' numbers")
        for own in by_layer.values():
            for each in ("head_dim", "num_key_value_heads"):
                if each in own:
                    self._number(each, own[each], replace(NUMBERS[each], null=False))

    def _divisors(self, name: str, value: Any) -> None:
        """Check a list of longrope."""
        if not isinstance(value, list) or not value or not all(map(_DIVISOR.allow, value)):
            raise self.error(name, value, f"a list with {_DIVISOR} for every frequency")

    def rope_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config's RoPE parameters as one mapping, merged as transformers does.

        Older files have `rope_scaling` with `type`, and `rope_theta` outside of it. Raises CheckpointError for anything
        but a mapping of values, such as separate parameters for each kind of layer.
        """
        name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        rope = values.get(name) or {}
        if _is_by_kind(rope, values):
            rope = rope.get(FULL) or {}
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise self.error(name, rope, "RoPE parameters that hold for all layers")
        merged = {"rope_type": rope.get("type", "default"), **rope}
        family = _family(values)
        if family is not None and isinstance(merged["rope_type"], str):
            merged["rope_type"] = family.rope_types.get(merged["rope_type"], merged["rope_type"])
        if "rope_theta" in values:
            merged.setdefault("rope_theta", values["rope_theta"])
        if values.get("partial_rotary_factor") is not None:
            merged.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        return merged

    def sliding_rope_of(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the RoPE parameters of layers with a window; None if they are those of the others."""
        family, rope = _family(values), values.get("rope_parameters") or {}
        if family is None or not family.has_layer_windows:
            return None
        if _is_by_kind(rope, values):
            rope = rope.get(SLIDING)
            if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
                raise self.error("rope_parameters", values["rope_parameters"], f"RoPE parameters with {SLIDING}")
            return {"rope_type": "default", "rope_theta": 10000.0, **rope}
        return family.sliding_rope(values) if family.sliding_rope else None

    def token_ids(self, value: Any, name: str = "eos_token_id") -> tuple[int, ...]:
        """Return the token ids in a config's value, which is null, one id or a list. Raises CheckpointError."""
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(token) is int and 0 <= token < _MOST_IDS for token in ids):
            raise self.error(name, value, "a token id, or a list of them")
        return tuple(ids)


def _is_by_kind(rope: Any, values: Mapping[str, Any]) -> bool:
    """Return whether RoPE parameters are those of each kind of layer."""
    family = _family(values)
    return family is not None and family.has_layer_windows and isinstance(rope, Mapping) and FULL in rope


def window_in_use(values: Mapping[str, Any]) -> Any:
    """Return a config's sliding window, or None if the model does not use it, as in most of Qwen's configs."""
    family = _family(values)
    is_optional = family is not None and family.has_optional_window
    return None if is_optional and not values.get("use_sliding_window") else values.get("sliding_window")


def _family(values: Mapping[str, Any]) -> Family | None:
    """Return the family of a config; None if it is not known."""
    name = values.get("model_type")
    return FAMILIES.get(name) if isinstance(name, str) else None


def check_of_config(place: Any) -> ConfigCheck:
    """Return the checks of a config.json."""
    return ConfigCheck(str(place), {}, "correct it there, or fetch the model again")


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


def _text(number: float) -> str:
    """Format a limit for an error message."""
    return f"{number:,}" if isinstance(number, int) and number < 10**13 else f"{number:g}"
