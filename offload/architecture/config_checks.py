"""Checks the numbers in a model's config before anything is computed from them.

One table of limits serves config.json and GGUF metadata. A value outside them would end in a crash, a long wait or
wrong output. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..short_repr import short_repr
from ..units import MOST_TOKENS

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
}
ROPE_NUMBERS = {
    "rope_theta": Limits(float, 2, 1e30, 10000),
    "factor": Limits(float, 1, 2**20, 4),
    "original_max_position_embeddings": Limits(float, 2, MOST_TOKENS, 8192),
    "low_freq_factor": Limits(float, 1e-3, 1e6, 1),
    "high_freq_factor": Limits(float, 1e-3, 1e6, 4),
    "beta_fast": Limits(float, 1e-3, 1e6, 32, null=True),
    "beta_slow": Limits(float, 1e-3, 1e6, 1, null=True),
    "attention_factor": Limits(float, 1e-3, 1e3, 1, null=True),
    "mscale": Limits(float, 0, 1e3, 1, null=True),
    "mscale_all_dim": Limits(float, 0, 1e3, 1, null=True),
    "partial_rotary_factor": Limits(float, 0, 1, 1),
}
_DIVISOR = Limits(float, 1e-3, 1e6, 1)  # in the lists of longrope
_LISTS = ("short_factor", "long_factor")
_EVERY_ROPE = ("rope_theta", "partial_rotary_factor")
_OF_ROPE_TYPE = {  # the parameters that transformers reads, and those that it requires
    "linear": (("factor",), ("factor",)),
    "dynamic": (("factor",), ("factor",)),
    "yarn": (
        (
            *("factor", "original_max_position_embeddings", "beta_slow", "beta_fast"),
            *("attention_factor", "mscale", "mscale_all_dim"),
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

    def check(self, values: Mapping[str, Any]) -> None:
        """Check a config's numbers, flags, token ids, heads and RoPE, under transformers' names.

        Absent values are not checked: they have defaults. Raises CheckpointError with the name, the value and the
        values that are allowed.
        """
        named = (values.get(name) for name in ("sliding_window", "use_sliding_window"))
        window = window_in_use(str(values.get("model_type")), *named)
        for name, limits in NUMBERS.items():
            if name in values and not (name == "sliding_window" and window is None):
                self._number(name, values[name], limits)
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
            if name in values and not isinstance(values[name], bool):
                raise self.error(name, values[name], "true or false")
        self.token_ids(values.get("eos_token_id"))
        self.heads(values)
        self._rope(self.rope_of(values))

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
        for lower, higher in _ASCENDING:
            first, second = rope.get(lower), rope.get(higher)
            if lower in read and first is not None and second is not None and first >= second:
                raise self.error(lower, first, f"below {self.names.get(higher, higher)}, which is {short_repr(second)}")

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
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise self.error(name, rope, "RoPE parameters that hold for all layers")
        merged = {"rope_type": rope.get("type", "default"), **rope}
        if "rope_theta" in values:
            merged.setdefault("rope_theta", values["rope_theta"])
        if values.get("partial_rotary_factor") is not None:
            merged.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        return merged

    def token_ids(self, value: Any, name: str = "eos_token_id") -> tuple[int, ...]:
        """Return the token ids in a config's value, which is null, one id or a list. Raises CheckpointError."""
        ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(token) is int and 0 <= token < _MOST_IDS for token in ids):
            raise self.error(name, value, "a token id, or a list of them")
        return tuple(ids)


def window_in_use(family: str, window: Any, is_used: Any) -> Any:
    """Return a config's sliding window, or None if the model does not use it, as in most of Qwen's configs."""
    return None if family.startswith("qwen") and not is_used else window


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
