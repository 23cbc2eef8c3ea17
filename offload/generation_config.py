"""The settings of one request: how tokens are sampled, how many, and what ends them. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .errors import SettingsError
from .short_repr import short_repr
from .units import MOST_TOKENS
from .validation import require, require_tokens

HIGHEST_TEMPERATURE = 1_000_000  # far above, all tokens are equally likely; infinity would divide to NaN
LEAST_PENALTY, LARGEST_PENALTY = 0.01, 100  # beyond, logits exceed the range of float32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is sampled from logits; the same at every level of the hierarchy.

    A temperature of 0 is argmax. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch that step off.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature <= HIGHEST_TEMPERATURE,
            f"temperature is {self.temperature}",
            f"use 0 for greedy decoding, or a number up to {HIGHEST_TEMPERATURE:,}, such as 0.6",
        )
        require(0 < self.top_p <= 1, f"top-p is {self.top_p}", "use a number above 0 and up to 1; 1 switches it off")
        hint = f"use a whole number below {2**31:,}; 0 switches it off"
        require(0 <= self.top_k < 2**31, f"top-k is {short_repr(self.top_k)}", hint)
        require(0 <= self.min_p <= 1, f"min-p is {self.min_p}", "use a number from 0 to 1; 0 switches it off")
        require(
            LEAST_PENALTY <= self.repetition_penalty <= LARGEST_PENALTY,
            f"repetition-penalty is {self.repetition_penalty}",
            f"use a number from {LEAST_PENALTY} to {LARGEST_PENALTY}; 1 switches it off, 1.1 is mild",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below, fp32 rounds every other probability to 0

    @classmethod
    def from_generation_config(cls, values: dict) -> Sampling:
        """Return the model's defaults (generation_config.json); keys that are missing or null keep ours.

        `do_sample` is ignored: it is false in many files that also give a temperature, and does not mean greedy.
        Raises SettingsError for unusable values.
        """
        known = {f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None}
        try:
            for name, value in known.items():
                kinds = (int,) if name == "top_k" else (int, float)
                if type(value) not in kinds:
                    raise TypeError(f"{name} is {short_repr(value)}")
            return replace(cls(), **known)
        except (SettingsError, TypeError) as error:
            raise SettingsError(
                f"the model's generation_config.json is unusable: {error}", "correct or remove that file"
            ) from error


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How many tokens one request generates, the seed, and what ends it."""

    max_new_tokens: int = 512
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hint = f"ask for at least 1, and no more than the model's context; none is above {MOST_TOKENS:,}"
        require_tokens("max-new-tokens", self.max_new_tokens, 1, hint)
        require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed is {short_repr(self.seed)}",
            "use a whole number from 0 to 2^63 - 1",
        )
        require(all(self.stop), "a stop string is empty", 'give --stop some text, such as --stop "\\n\\n"')
