"""From a configuration to tokens: open a model, see whether the request fits, load the weights, generate.

Opening reads headers only, so everything that can be wrong with a request is said before the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from .checkpoint import Checkpoint
from .config import EngineConfig, GenerationConfig, Sampling
from .decode import autoregressive
from .errors import PromptError, SettingsError
from .events import Event, Finished, Tokens
from .linear import multiplies_natively
from .memory import MemoryEstimate, available, check_fit, estimate
from .model import Model
from .prefill import prefill
from .sampling import Sampler
from .sources import FetchProgress, locate, open_checkpoint, silent
from .text import Tokenizer
from .weights import Progress, check_tensors, load_model


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA GPU, else the CPU. Raises SettingsError for a device that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("no CUDA device is available to this torch", "use --device cpu, or install torch for CUDA")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 (fp16 on GPUs without it): half the bytes of fp32, and bytes are what decoding waits for."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


@dataclass(frozen=True)
class OpenModel:
    """A model whose files have been found and checked, but not loaded."""

    config: EngineConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.checkpoint.load_tokenizer())

    @property
    def sampling(self) -> Sampling:
        """The model's own sampling defaults."""
        return Sampling.from_generation_config(self.checkpoint.generation)

    def new_tokens(self, prompt_tokens: int, wanted: int, exact: bool) -> int:
        """How many tokens may follow the prompt: `wanted`, or what the context leaves if that is not `exact`.

        Raises PromptError with the numbers where the prompt, or the prompt and an exact wish, exceed the context.
        """
        context = self.checkpoint.shape.context
        limit = f"the model's context of {context:,} tokens"
        if self.checkpoint.shape.sliding_window == context:
            limit += " (its sliding window)"
        if prompt_tokens >= context:
            raise PromptError(
                f"the prompt has {prompt_tokens:,} tokens, which leaves no room in {limit}",
                "shorten the prompt, split the document, or use --model with a longer context",
            )
        if exact and prompt_tokens + wanted > context:
            raise PromptError(
                f"{prompt_tokens:,} prompt tokens and {wanted:,} new ones exceed {limit}",
                f"use --max-new-tokens {context - prompt_tokens} or fewer, or shorten the prompt",
            )
        return min(wanted, context - prompt_tokens)

    def estimate(self, tokens: int) -> MemoryEstimate:
        """Memory for a sequence of so many tokens."""
        return estimate(self.checkpoint.shape, tokens, self.config.prefill_chunk, self.dtype.itemsize)

    def check_fit(self, tokens: int, memory_limit: int | None = None) -> None:
        """Raises OutOfMemory if a sequence of `tokens` does not fit the device (or `memory_limit` bytes of it)."""
        free = available(self.device)
        check_fit(self.estimate(tokens), free if memory_limit is None else min(free, memory_limit))

    def load(self, progress: Progress = lambda done, total: None) -> Engine:
        """Read the weights."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        model = load_model(self.checkpoint, self.dtype, self.device, progress)
        return Engine(model, self.checkpoint.shape.eos_ids, self.config.prefill_chunk)


def open_model(config: EngineConfig, home: Path | None = None, progress: FetchProgress = silent) -> OpenModel:
    """Find a model (fetching it if need be), and check its config, its headers, the device and the dtype.

    Args:
        home: triforce's cache folder; None for the platform's.
        progress: called while something is fetched.

    Raises:
        ModelNotFound, UnsupportedModel, CheckpointError, FetchError, SettingsError.
    """
    device = resolve_device(config.device)
    checkpoint = open_checkpoint(locate(config.model, home, progress))
    check_tensors(checkpoint)
    return OpenModel(config, checkpoint, device, resolve_dtype(config.dtype, device))


class Engine:
    """A loaded model. It knows tokens, not text; each request has a KV cache of its own."""

    def __init__(self, model: Model, eos_ids: Sequence[int], prefill_chunk: int) -> None:
        self.model = model
        self._eos_ids = frozenset(eos_ids)
        self._prefill_chunk = prefill_chunk

    def generate(self, ids: Sequence[int], sampling: Sampling, config: GenerationConfig) -> Iterator[Event]:
        """Prefill `ids`, then emit up to `config.max_new_tokens` tokens, one event at a time.

        Yields Prefilled, then Tokens, then one Finished. An end-of-sequence token ends the run and is not emitted.
        Without a seed in `config`, the seed is 0.
        Stop strings are the text layer's (`text.stream_text`). Abandoning the iterator at any point is safe.
        """
        model = self.model
        length = len(ids) + config.max_new_tokens
        cache = model.new_cache(length, model.rope(length))
        prompt = torch.tensor(ids, device=model.device)
        hidden = yield from prefill(model, prompt, cache, self._prefill_chunk)
        sampler = Sampler(sampling, config.seed or 0, model.shape.vocab, model.device)
        sampler.observe(prompt)
        for emitted, token in enumerate(autoregressive(model, cache, hidden, sampler), 1):
            if token in self._eos_ids:
                yield Finished("eos")
                return
            yield Tokens((token,))
            if emitted == config.max_new_tokens:
                break
        yield Finished("length")

    def describe(self) -> str:
        """Device, dtype and how large products are computed, for people."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        native = multiplies_natively(self.model.device.type, self.model.dtype)
        return f"{self.model.device.type}, {dtype}" + ("" if native else " (blocks of rows in float32)")
