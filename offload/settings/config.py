"""All settings, with their defaults and limits: the only source of both. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from ..short_repr import short_repr
from ..units import GIB, MOST_BYTES, MOST_TOKENS
from . import methods
from .generation import GenerationConfig, Sampling
from .kv_formats import AUTO, full_formats
from .placement_settings import Placement
from .tree_settings import TREE_SAMPLINGS, TreeSampling, TreeShape
from .validation import (
    require,
    require_between,
    require_one_of,
    require_tokens,
    require_types,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "avx512", "avx2", "bf16", "neon", "portable", "off")
QUANTIZE = ("q4", "q5", "q6", "q8")
METHODS = tuple(methods.METHODS)
MTP = "mtp"  # the draft: a head in the target's own checkpoint
DRAFTS = ("lookup", "none")  # values of `draft` that are not the name of a model
LONGEST_GAMMA = 32
LEAST_BUDGET = 1024  # of the budgets that follow from a sequence's length
DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Set where and how the model runs. `auto` is resolved from the hardware when the engine is loaded.

    `kernel` is the level of the native kernel, which runs on the CPU; with `off`, torch runs everything. `quantize` is
    the level to which the weights are rounded while they are loaded, which changes the model; None leaves them. `kv` is
    the format of the full KV cache: BF16, or another one of `kv_formats`, which changes the answer unless it is exact;
    AUTO packs keys and values without loss where they lie over tiers.
    `threads` are those of the CPU, 0 for all cores; `prefill_chunk` is the tokens of one prefill pass. Raises
    SettingsError.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0  # 0: as many as this process has cores
    prefill_chunk: int = 512
    kernel: str = "auto"
    quantize: str | None = None
    kv: str = AUTO

    def __post_init__(self) -> None:
        require_types(self)
        require_one_of("device", self.device, DEVICES)
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("kernel", self.kernel, KERNELS)
        require_one_of("kv", self.kv, full_formats())
        if self.quantize is not None:
            require_one_of("quantize", self.quantize, QUANTIZE, ", or leave it out")
        require(bool(self.model), "the model's name is empty", "name a folder, a .gguf file, a hub id, or leave it out")
        require_between("threads", self.threads, 0, 1024, "use 1 to 1024, or 0 for all cores")
        require_tokens("prefill-chunk", self.prefill_chunk, 1, "use a positive number of tokens, such as 512")


def engine_config(model: str | PathLike[str] | EngineConfig) -> EngineConfig:
    """Return the settings of a model that is given by its name or path. Raises SettingsError for anything else."""
    if isinstance(model, EngineConfig):
        return model
    hint = "give a name, a folder, a .gguf file, a hub id, or an offload.EngineConfig"
    named = isinstance(model, (str, PathLike))
    require(named, f"the model is {short_repr(model)}, of type {type(model).__name__}", hint)
    return EngineConfig(model=str(model))


@dataclass(frozen=True, slots=True)
class Speculation:
    """Set the method of speculative decoding. None of it but `approximate` changes the output, only the speed.

    `approximate` is one of `methods.APPROXIMATIONS`: the target decodes plainly, on `budget` tokens of its keys and
    values alone; None for all of them. Of these tokens the first `sink` ones and, for h2o, the latest `window` ones are
    always kept.

    `draft` is "lookup", "none", a model or a head, named as in EngineConfig.model, or "mtp" for the head in the
    target's checkpoint.
    `sink` and `window` are tokens of a draft model's StreamingLLM cache; `budget` and `chunk` are tokens of the
    retrieval cache and of one chunk. A budget of None follows from the sequence's length (`levels.suggested_budget`);
    with `approximate` it is LEAST_BUDGET. `rebuild_every` (tokens), `gamma1` and `gamma2` (drafted tokens per
    verification, lower and upper level) are adaptive if None.
    `middle` is one of `methods.MIDDLES`: how the middle level selects its chunks; None as the method does.
    `tree` is the shape of the drafts, as `TreeShape.parse` reads it, and `tree_sampling` how their tokens are drawn.
    """

    method: str = "auto"
    draft: str = "lookup"
    sink: int = 16
    window: int = 240
    budget: int | None = None
    chunk: int = 8
    rebuild_every: int | None = None
    gamma1: int | None = None
    gamma2: int | None = None
    tree: str = "chain"
    tree_sampling: str = TreeSampling.WITHOUT_REPLACEMENT.value
    middle: str | None = None
    approximate: str | None = None

    def __post_init__(self) -> None:
        require_types(self)
        require_one_of("method", self.method, METHODS)
        require(bool(self.draft), "the draft's name is empty", "use lookup, none, or a model")
        require_tokens("sink", self.sink, 0, "use a number of tokens, such as 16")
        require_tokens("window", self.window, 1, "use a positive number of tokens, such as 240")
        require_tokens("chunk", self.chunk, 1, "use a positive number of tokens, such as 8")
        require(
            self.budget is None or 4 * self.chunk <= self.budget <= 4 * MOST_TOKENS,
            f"budget is {short_repr(self.budget)}, with chunks of {self.chunk}",
            f"use 4 chunks at least, and {4 * MOST_TOKENS:,} tokens at most",
        )
        hint = "use a positive number of tokens, or leave it out"
        require_tokens("rebuild-every", self.rebuild_every, 1, hint)
        TreeShape.parse(self.tree)
        for name, gamma in (("gamma1", self.gamma1), ("gamma2", self.gamma2)):
            require_between(name, gamma, 1, LONGEST_GAMMA, f"use 1 to {LONGEST_GAMMA} tokens, or leave it out")
        require_one_of("tree-sampling", self.tree_sampling, TREE_SAMPLINGS)
        if self.middle is not None:
            require_one_of("middle", self.middle, methods.MIDDLES, ", or leave it out")
        if methods.METHODS[self.method].needs_draft_model:
            hint = "give --draft one, or use --method lookup"
            require(self.draft_model is not None, f"{self.method} needs a draft model", hint)
        if self.approximate is not None:
            self._check_approximate()

    def _check_approximate(self) -> None:
        allowed = methods.APPROXIMATIONS
        require_one_of("approximate", self.approximate, allowed, ", or leave it out")
        require(
            self.method == methods.PLAIN,
            f"approximate {self.approximate} decodes plainly, and the method is {self.method}",
            f"leave --method out, or use --method {methods.PLAIN}",
        )
        window = self.window if "window" in allowed[str(self.approximate)].reads else 0
        kept = f"the sink of {self.sink:,}" + (f" and the window of {window:,}" if window else "")
        require(
            self.sink + window < self.kept_tokens,
            f"the budget of {self.kept_tokens:,} tokens leaves none beside {kept}",
            "use a larger --budget, or a smaller sink or window, such as --set window=64",
        )

    @property
    def kept_tokens(self) -> int:
        """The tokens that an approximate cache keeps."""
        return LEAST_BUDGET if self.budget is None else self.budget

    @property
    def tree_shape(self) -> TreeShape:
        return TreeShape.parse(self.tree)

    @property
    def draft_source(self) -> str | None:
        """The name of the draft model, if it is to be found; None if it is a part of the target, too."""
        return None if self.draft == MTP else self.draft_model

    @property
    def draft_model(self) -> str | None:
        """The name of the draft model; None if `draft` is not a model."""
        return None if self.draft in DRAFTS else self.draft


@dataclass(frozen=True, slots=True)
class Caching:
    """Whether prompts are cached on disk, and how many bytes. `cache` None caches those over a minimum length."""

    cache: bool | None = None
    cache_limit: int = 20 * GIB

    def __post_init__(self) -> None:
        require_types(self)
        require_between("cache-limit", self.cache_limit, 0, MOST_BYTES, "use a size such as 20GiB")


@dataclass(frozen=True, slots=True)
class Parallel:
    """The number of ranks that share the model, each with its own device. It does not change the text.

    `tensor_parallel` None is one rank for each GPU of the profile; `join_timeout` is the seconds to wait for all ranks.
    """

    tensor_parallel: int | None = None
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        require_types(self)
        require_between("tensor-parallel", self.tensor_parallel, 1, 1024, "use a number of ranks, such as 2")
        seconds = self.join_timeout
        require(0 < seconds < 2**31, f"join-timeout is {seconds}", "use a positive number of seconds, such as 300")


GROUPS = (EngineConfig, GenerationConfig, Sampling, Speculation, Placement, Caching, Parallel)  # of settings, all


def check_part(values: Mapping[str, Any]) -> None:
    """Check settings that are not complete yet, such as flags before a profile's options are added.

    Raises SettingsError for values that would be wrong whatever is added: missing settings get values that fit.
    """
    fitting = {"draft": "a model", "chunk": 1, "budget": 4 * values.get("chunk", 1)}
    if values.get("approximate") is not None:
        fitting |= {"method": methods.PLAIN, "budget": 4 * MOST_TOKENS, "sink": 0, "window": 1}
    for group in GROUPS:
        group(**{f.name: (fitting | dict(values))[f.name] for f in fields(group) if f.name in {*fitting, *values}})
