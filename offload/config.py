"""What can be chosen, with its defaults and its limits: the one source for both. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from . import methods
from .errors import SettingsError
from .short_repr import short_repr
from .units import GIB, MOST_BYTES, MOST_TOKENS

SLOWEST_LINK = 0.0001  # GB/s that can be simulated: slower, a single copy takes minutes
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "avx512", "avx2", "portable", "off")
OFFLOADS = ("auto", "none", "stream", "host", "hybrid")
METHODS = tuple(methods.METHODS)
DRAFTS = ("lookup", "none")  # beside models
LONGEST_GAMMA = 32
HIGHEST_TEMPERATURE = 1_000_000  # all tokens are equally likely long before; infinite ones would divide to NaN
LEAST_PENALTY, LARGEST_PENALTY = 0.01, 100  # beyond, logits leave what float32 holds
DEFAULT_MODEL = "smollm2-135m"


def _require(condition: bool, message: str, hint: str) -> None:
    if not condition:
        raise SettingsError(message, hint)


def _require_tokens(name: str, value: int | None, least: int, hint: str) -> None:
    """No setting in tokens is longer than any context; None is left to others."""
    _require(value is None or least <= value <= MOST_TOKENS, f"{name} is {short_repr(value)}", hint)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become a distribution and a distribution a token; the same at every level of the hierarchy.

    A temperature of 0 is argmax. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch that step off.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(
            0 <= self.temperature <= HIGHEST_TEMPERATURE,
            f"temperature is {self.temperature}",
            f"use 0 for greedy decoding, or a number up to {HIGHEST_TEMPERATURE:,}, such as 0.6",
        )
        _require(0 < self.top_p <= 1, f"top-p is {self.top_p}", "use a number above 0 and up to 1; 1 switches it off")
        hint = f"use a whole number below {2**31:,}; 0 switches it off"
        _require(0 <= self.top_k < 2**31, f"top-k is {short_repr(self.top_k)}", hint)
        _require(0 <= self.min_p <= 1, f"min-p is {self.min_p}", "use a number from 0 to 1; 0 switches it off")
        _require(
            LEAST_PENALTY <= self.repetition_penalty <= LARGEST_PENALTY,
            f"repetition-penalty is {self.repetition_penalty}",
            f"use a number from {LEAST_PENALTY} to {LARGEST_PENALTY}; 1 switches it off, 1.1 is mild",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below, fp32 holds nothing beside the largest logit

    @classmethod
    def from_generation_config(cls, values: dict) -> Sampling:
        """The model's own defaults (generation_config.json); silent keys keep ours.

        `do_sample: false` beside a temperature means nothing was chosen, as in transformers; it does not mean greedy.
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
    """One request: how many tokens, drawn how, and what ends them."""

    max_new_tokens: int = 512
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hint = f"ask for at least 1, and no more than the model's context; none is above {MOST_TOKENS:,}"
        _require_tokens("max-new-tokens", self.max_new_tokens, 1, hint)
        _require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed is {short_repr(self.seed)}",
            "use a whole number from 0 to 2^63 - 1",
        )
        _require(all(self.stop), "a stop string is empty", 'give --stop some text, such as --stop "\\n\\n"')


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where and how the model runs. `auto` is resolved from the hardware when the engine is loaded.

    `kernel` is the level of the native kernel, which serves on the CPU; `off` leaves everything to torch.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0  # 0: as many as the machine has cores
    prefill_chunk: int = 512
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("device", self.device, DEVICES),
            ("dtype", self.dtype, DTYPES),
            ("kernel", self.kernel, KERNELS),
        ):
            _require(value in allowed, f"{name} is {short_repr(value)}", f"use one of: {', '.join(allowed)}")
        _require(
            bool(self.model), "the model's name is empty", "name a folder, a .gguf file, a hub id, or leave it out"
        )
        _require(
            0 <= self.threads <= 1024, f"threads is {short_repr(self.threads)}", "use 1 to 1024, or 0 for all cores"
        )
        _require_tokens("prefill-chunk", self.prefill_chunk, 1, "use a positive number of tokens, such as 512")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How decoding is sped up. None of it changes what comes out, only how soon.

    `draft` is "lookup", "none" or a model (what EngineConfig.model takes). `sink` and `window` are tokens of a draft
    model's StreamingLLM cache; `budget` and `chunk` are tokens of the retrieval cache and of a piece of it. None for
    `rebuild_every` (tokens), `gamma1` and `gamma2` (drafted tokens a verification, lower and upper level) is adaptive.
    """

    method: str = "auto"
    draft: str = "lookup"
    sink: int = 16
    window: int = 240
    budget: int = 1024
    chunk: int = 8
    rebuild_every: int | None = None
    gamma1: int | None = None
    gamma2: int | None = None

    def __post_init__(self) -> None:
        _require(self.method in METHODS, f"method is {short_repr(self.method)}", f"use one of: {', '.join(METHODS)}")
        _require(bool(self.draft), "the draft's name is empty", "use lookup, none, or a model")
        _require_tokens("sink", self.sink, 0, "use a number of tokens, such as 16")
        _require_tokens("window", self.window, 1, "use a positive number of tokens, such as 240")
        _require_tokens("chunk", self.chunk, 1, "use a positive number of tokens, such as 8")
        _require(
            4 * self.chunk <= self.budget <= 4 * MOST_TOKENS,
            f"budget is {short_repr(self.budget)}, with chunks of {self.chunk}",
            f"use 4 chunks at least, and {4 * MOST_TOKENS:,} tokens at most",
        )
        hint = "use a positive number of tokens, or leave it out"
        _require_tokens("rebuild-every", self.rebuild_every, 1, hint)
        for name, gamma in (("gamma1", self.gamma1), ("gamma2", self.gamma2)):
            _require(
                gamma is None or 1 <= gamma <= LONGEST_GAMMA,
                f"{name} is {short_repr(gamma)}",
                f"use 1 to {LONGEST_GAMMA} tokens, or leave it out",
            )
        if methods.METHODS[self.method].needs_draft_model:
            hint = "give --draft one, or use --method lookup"
            _require(self.draft_model is not None, f"{self.method} needs a draft model", hint)

    @property
    def draft_model(self) -> str | None:
        """The model to draft with, if it is one."""
        return None if self.draft in DRAFTS else self.draft


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the full KV cache lives, and how what is not on the device is attended to. None of it changes the text.

    `offload`: none keeps all KV on the device; stream brings what lies in host memory over the link; host attends to it
    where it lies; hybrid does both at once; auto is what the plan finds best. `memory` and `host_memory` are bytes that
    may be used, None for what is free. `resident_layers` keep their KV on the device, None for as many as fit;
    `host_share` is the part of the other layers' KV that the host attends to, None for what makes both end together.
    `link_gb_s` simulates a link of 10^9 bytes a second to a device on the CPU, to try all this without a GPU.
    """

    offload: str = "auto"
    memory: int | None = None
    host_memory: int | None = None
    resident_layers: int | None = None
    host_share: float | None = None
    link_gb_s: float | None = None

    def __post_init__(self) -> None:
        _require(
            self.offload in OFFLOADS, f"offload is {short_repr(self.offload)}", f"use one of: {', '.join(OFFLOADS)}"
        )
        for name, size in (("memory", self.memory), ("host-memory", self.host_memory)):
            _require(
                size is None or 1 <= size <= MOST_BYTES,
                f"{name} is {short_repr(size)}",
                "use a size such as 22GiB, or leave it out",
            )
        layers, share, link = self.resident_layers, self.host_share, self.link_gb_s
        _require(
            layers is None or 0 <= layers <= 10_000,
            f"resident-layers is {short_repr(layers)}",
            "use 0 to 10,000, or leave it out",
        )
        _require(share is None or 0 <= share <= 1, f"host-share is {share}", "use a number from 0 to 1")
        _require(
            share is None or self.offload in ("auto", "hybrid"),
            f"host-share goes with hybrid, and offload is {self.offload}",
            "use --offload hybrid, or leave --host-share out",
        )
        _require(
            link is None or SLOWEST_LINK <= link < math.inf,
            f"link is {link} GB/s",
            f"use a number from {SLOWEST_LINK}, such as 25",
        )


@dataclass(frozen=True, slots=True)
class Caching:
    """Whether prompts are kept on disk, and how many bytes of them. `cache` None: those that are worth it."""

    cache: bool | None = None
    cache_limit: int = 20 * GIB

    def __post_init__(self) -> None:
        _require(
            0 <= self.cache_limit <= MOST_BYTES,
            f"cache-limit is {short_repr(self.cache_limit)}",
            "use a size such as 20GiB",
        )


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many ranks share the model, each with a device of its own. None of it changes what the model says.

    `tensor_parallel` None is one for each GPU of the profile; `join_timeout` is seconds until all ranks must be there.
    """

    tensor_parallel: int | None = None
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        count, seconds = self.tensor_parallel, self.join_timeout
        _require(
            count is None or 1 <= count <= 1024,
            f"tensor-parallel is {short_repr(count)}",
            "use a number of ranks, such as 2",
        )
        _require(0 < seconds < 2**31, f"join-timeout is {seconds}", "use a positive number of seconds, such as 300")


GROUPS = (
    EngineConfig,
    GenerationConfig,
    Sampling,
    Speculation,
    Placement,
    Caching,
    Parallel,
)  # everything that can be set


def check_part(values: Mapping[str, Any]) -> None:
    """Check settings to which others may yet be added, as flags to a profile's options.

    Raises SettingsError for what could not be right whatever is added; so what is missing counts as what would fit.
    """
    fitting = {"draft": "a model", "chunk": 1, "budget": 4 * values.get("chunk", 1)}
    for group in GROUPS:
        group(**{f.name: (fitting | dict(values))[f.name] for f in fields(group) if f.name in {*fitting, *values}})
