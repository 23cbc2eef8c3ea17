"""The settings of one request: how tokens are sampled, how many, and what ends them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import SettingsError
from ..short_repr import short_repr
from .constraint import Constraint
from .validation import require, require_between, require_instance, require_tokens, require_types

HIGHEST_TEMPERATURE = 1_000_000  # far above, all tokens are equally likely; infinity would divide to NaN
LEAST_PENALTY, LARGEST_PENALTY = 0.01, 100  # beyond, logits exceed the range of float32
LEAST_DRY = 1e-6  # a multiplier below, of a base of 2, needs repetitions of 20 tokens for a penalty of 1
DRY_BREAKERS = ("\n", ":", '"', "*")  # repetitions that DRY penalises do not cross tokens that contain one of these
COUPLED, FASTEST = "coupled", "fastest"  # kinds of sampling
_KEYS = {"no_repeat_ngram": "no_repeat_ngram_size"}  # in generation_config.json, where it is not the field's name
_OURS = ("coupled", "constraint")  # fields that no model's file has
_INTEGERS = ("top_k", "dry_allowed_length", "dry_range", "no_repeat_ngram")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Set how a token is sampled from logits; the same at every level of the hierarchy. Raises SettingsError.

    The steps, in the order of transformers and llama.cpp: repetition, frequency and presence penalty, DRY, no-repeat
    n-gram, temperature, top-k, top-p, min-p. Each is off at its default, but for temperature and top-p (off at 1).

    Attributes:
        temperature: divides logits; 0 is argmax.
        top_p, top_k, min_p: keep the likeliest tokens: up to this sum, this many, at least this likely relative to the
            likeliest. Off at 1, 0 and 0.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        frequency_penalty, presence_penalty: subtracted from the logits of tokens in the output, once for every
            occurrence and once in all. The prompt does not count. OpenAI's definition.
        dry_multiplier, dry_base, dry_allowed_length, dry_range: if the last n tokens occur earlier in the last
            `dry_range` tokens of prompt and output (0 is all), a token that followed them there loses multiplier * base
            ** (n - allowed length), from the allowed length on. Matches do not cross tokens that contain one of
            `DRY_BREAKERS`. A multiplier of 0 is off. As in llama.cpp and text-generation-webui.
        no_repeat_ngram: no n-gram of this size occurs twice in prompt and output; 0 is off. If that would leave no
            token at all, it does not apply.
        coupled: draw with noise that depends on the seed, the position and the token alone. The text then does not
            depend on the method. Fewer drafted tokens are accepted. Has no effect on greedy decoding.
        constraint: what the answer must match. Tokens with which it cannot be completed have no probability, before
            all other steps.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    no_repeat_ngram: int = 0
    coupled: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        require_types(self)
        if self.constraint is not None:
            require_instance("constraint", self.constraint, Constraint)
        hint = f"use 0 for greedy decoding, or a number up to {HIGHEST_TEMPERATURE:,}, such as 0.6"
        require_between("temperature", self.temperature, 0, HIGHEST_TEMPERATURE, hint)
        hint = "use a number above 0 and up to 1; 1 switches it off"
        require(0 < self.top_p <= 1, f"top-p is {short_repr(self.top_p)}", hint)
        hint = f"use a whole number below {2**31:,}; 0 switches it off"
        require_between("top-k", self.top_k, 0, 2**31 - 1, hint)
        require_between("min-p", self.min_p, 0, 1, "use a number from 0 to 1; 0 switches it off")
        hint = f"use a number from {LEAST_PENALTY} to {LARGEST_PENALTY}; 1 switches it off, 1.1 is mild"
        require_between("repetition-penalty", self.repetition_penalty, LEAST_PENALTY, LARGEST_PENALTY, hint)
        hint = "use a number from -2 to 2; 0 switches it off"
        require_between("frequency-penalty", self.frequency_penalty, -2, 2, hint)
        require_between("presence-penalty", self.presence_penalty, -2, 2, hint)
        require(
            self.dry_multiplier == 0 or LEAST_DRY <= self.dry_multiplier <= 100,
            f"dry-multiplier is {short_repr(self.dry_multiplier)}",
            f"use 0, which switches it off, or a number from {LEAST_DRY} to 100; 0.8 is usual",
        )
        require_between("dry-base", self.dry_base, 1, 100, "use a number from 1 to 100, such as 1.75")
        require_tokens("dry-allowed-length", self.dry_allowed_length, 1, "use a positive number of tokens, such as 2")
        require_tokens("dry-range", self.dry_range, 0, "use a number of tokens, or 0 for all of them")
        require_tokens("no-repeat-ngram", self.no_repeat_ngram, 0, "use a size such as 3; 0 switches it off")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below, fp32 rounds every other probability to 0

    @property
    def kind(self) -> str:
        """How tokens are drawn: greedy, coupled or fastest."""
        return "greedy" if self.greedy else COUPLED if self.coupled else FASTEST

    def in_chat(self, is_chat: bool) -> Sampling:
        """Return the sampling of an answer in a chat template, or of none: there a model may think before it."""
        if self.constraint is None or self.constraint.after_thinking is not None:
            return self
        return replace(self, constraint=replace(self.constraint, after_thinking=is_chat))

    def overridden(self, given: Mapping[str, Any]) -> Sampling:
        """Return the sampling with the given fields by name; self is the model's own.

        A given temperature of 0 is plain greedy decoding: the model's own penalties do not apply. Raises SettingsError.
        """
        is_greedy = "temperature" in given and Sampling(temperature=given["temperature"]).greedy
        return replace(Sampling() if is_greedy else self, **given)

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> Sampling:
        """Return the model's defaults (generation_config.json); keys that are missing or null keep ours.

        `do_sample` is ignored: it is false in many files that also give a temperature, and does not mean greedy.
        Raises SettingsError for unusable values.
        """
        keys = {f.name: _KEYS.get(f.name, f.name) for f in fields(cls) if f.name not in _OURS}
        known = {name: values[key] for name, key in keys.items() if values.get(key) is not None}
        try:
            for name, value in known.items():
                kinds = (int,) if name in _INTEGERS else (int, float)
                if type(value) not in kinds:
                    raise TypeError(f"{keys[name]} is {short_repr(value)}")
            return replace(cls(), **known)
        except (SettingsError, TypeError) as error:
            raise SettingsError(
                f"the model's generation_config.json is unusable: {error}", "correct or remove that file"
            ) from error


def parse_sampling(name: str | bool) -> bool:
    """Return `Sampling.coupled` for coupled or fastest. Raises SettingsError."""
    if isinstance(name, bool):
        return name
    require(name in (COUPLED, FASTEST), f"sampling is {short_repr(name)}", f"use {COUPLED} or {FASTEST}")
    return name == COUPLED


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Set how many tokens one request generates, the seed (None is 0), and the strings that end it.

    Raises SettingsError.
    """

    max_new_tokens: int = 512
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_types(self)
        hint = "use a whole number from 1 up to the model's context"
        require_tokens("max-new-tokens", self.max_new_tokens, 1, hint)
        require_between("seed", self.seed, 0, 2**63 - 1, "use a whole number from 0 to 2^63 - 1")
        require(all(self.stop), "a stop string is empty", 'give --stop some text, such as --stop "The end"')
