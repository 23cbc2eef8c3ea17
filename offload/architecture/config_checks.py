"""Checks the numbers in a model's config before anything is computed from them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError
from ..short_repr import short_repr
from .config_limits import (
    ASCENDING,
    DIVISOR,
    EVERY_ROPE,
    NUMBERS,
    OF_EXPERTS,
    OF_ROPE_TYPE,
    QUERY_SCALING,
    RATIO_TYPES,
    ROPE_LISTS,
    ROPE_NUMBERS,
    SWITCHES,
    Limits,
)
from .families import FAMILIES, Family
from .layer_spec import FULL, SLIDING

_MOST_IDS = 2**32
_BITS = (0, 1)


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
            if family is not None and name in family.not_null:
                limits = replace(limits, null=False)
            if name in OF_EXPERTS and values.get(name) is None:  # other families may have null
                is_unused = family is not None and "num_experts" not in family.defaults
            if name in values and not is_unused:
                self._number(name, values[name], limits)
        for name in SWITCHES:
            if name in values and not isinstance(values[name], bool):
                raise self.error(name, values[name], "true or false")
        self.token_ids(values.get("eos_token_id"))
        self.heads(values)
        self._flags("no_rope_layers", values)
        self._numbers_of_layers("mlp_only_layers", values)
        self._layer_types(values)
        self._per_layer_config(values)
        rope = self.rope_of(values)
        self._rope(rope)
        for name in QUERY_SCALING if family is not None and family.scales_queries else ():
            if name in rope and QUERY_SCALING[0] in rope:  # whatever the type of RoPE reads
                self._number(name, rope[name], ROPE_NUMBERS[name])
        if sliding := self.sliding_rope_of(values):
            self._rope(sliding)

    def _number(self, name: str, value: Any, limits: Limits) -> None:
        """Raise CheckpointError if a value is not within the limits."""
        if not limits.allow(value):
            raise self.error(name, value, str(limits), f", such as {limits.example_text}")

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

    def _rope(self, rope: Mapping[str, Any]) -> None:
        """Check the merged RoPE parameters that the RoPE type reads."""
        kind = rope.get("rope_type")
        read, required = OF_ROPE_TYPE.get(kind if isinstance(kind, str) else "", ((), ()))
        for name in required:
            if name not in rope:
                raise CheckpointError(f"{self.place}: RoPE {kind} without {name}", self.hint)
        for name in (*EVERY_ROPE, *read):
            if name not in rope or (name == "factor" and rope[name] is None and kind in RATIO_TYPES):
                continue
            if name in ROPE_LISTS:
                self._divisors(name, rope[name])
            else:
                self._number(name, rope[name], ROPE_NUMBERS[name])
        if kind == "yarn" and not isinstance(rope.get("truncate", True), bool):
            raise self.error("truncate", rope["truncate"], "true or false")
        for lower, higher in ASCENDING:
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
            self._even("head_dim", own.get("head_dim"))

    def _divisors(self, name: str, value: Any) -> None:
        """Check a list of longrope."""
        if not isinstance(value, list) or not value or not all(map(DIVISOR.allow, value)):
            raise self.error(name, value, f"a list with {DIVISOR} for every frequency")

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
