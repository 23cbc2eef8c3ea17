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
    "pard_token": Limits(int, 0, 2**28, 128002, null=True),
}
OF_EXPERTS = ("num_experts", "moe_intermediate_size")
SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_qk_norm"),
    *("norm_topk_prob", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
)

_MOST_IDS = 2**32
_BITS = (0, 1)


def _text(number: float) -> str:
    """Format a limit for an error message."""
    return f"{number:,}" if isinstance(number, int) and number < 10**13 else f"{number:g}"


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
        """Check a config's numbers, flags, token ids and heads, under transformers' names; its family is known.

        Absent values are not checked: they have defaults. Raises CheckpointError with the name, the value and the
        values that are allowed.
        """
        window, family = window_in_use(values), FAMILIES[values["model_type"]]
        for name, limits in NUMBERS.items():
            is_unused = name == "sliding_window" and window is None
            if name in family.not_null:
                limits = replace(limits, null=False)
            if name in OF_EXPERTS and values.get(name) is None:  # other families may have null
                is_unused = "num_experts" not in family.defaults
            if name in values and not is_unused:
                self.number(name, values[name], limits)
        for name in SWITCHES:
            if name in values and not isinstance(values[name], bool):
                raise self.error(name, values[name], "true or false")
        self.token_ids(values.get("eos_token_id"))
        self.heads(values)
        self._flags("no_rope_layers", values)
        self._numbers_of_layers("mlp_only_layers", values)
        self._layer_types(values)
        self._per_layer_config(values)

    def number(self, name: str, value: Any, limits: Limits) -> None:
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
        self._even("head_dim", head_dim)
        self._even("global_head_dim", values.get("global_head_dim"))

    def _even(self, name: str, head_dim: int | None) -> None:
        if head_dim and head_dim % 2:
            raise self.error(name, head_dim, "an even number: RoPE turns pairs")

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
        kinds, family = values.get("layer_types"), FAMILIES[values["model_type"]]
        if kinds is None or not family.layer_kinds:
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
                    self.number(each, own[each], replace(NUMBERS[each], null=False))
            self._even("head_dim", own.get("head_dim"))

    def token_ids(self, value: Any, name: str = "eos_token_id") -> tuple[int, ...]:
        """Return the token ids in a config's value, which is null, one id or a list. Raises CheckpointError."""
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(token) is int and 0 <= token < _MOST_IDS for token in ids):
            raise self.error(name, value, "a token id, or a list of them")
        return tuple(ids)


def window_in_use(values: Mapping[str, Any]) -> Any:
    """Return a config's sliding window, or None if the model does not use it, as in most of Qwen's configs."""
    is_optional = FAMILIES[values["model_type"]].has_optional_window
    return None if is_optional and not values.get("use_sliding_window") else values.get("sliding_window")


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
