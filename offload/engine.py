"""From a configuration to tokens: open a model, see whether the request fits, load the weights, generate.

Opening reads headers only, so everything that can be wrong with a request is said before the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from .checkpoint import Checkpoint
from .compatibility import check_draft
from .config import EngineConfig, GenerationConfig, Sampling, Speculation
from .errors import PromptError, SettingsError, TriforceError
from .events import Event
from .hierarchy import TAIL, draft_chunk, has_draft_model, has_middle
from .linear import multiplies_natively
from .memory import MemoryEstimate, available, check_fit, estimate
from .model import Model
from .operations import Operations, check_kernel, choose_operations
from .replay import Replay, replay
from .session import Session
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
    speculation: Speculation
    draft: Checkpoint | None  # the draft model's, where the method uses one

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.checkpoint.load_tokenizer())

    @property
    def kernel(self) -> str:
        """The level of the native kernel that will compute; "off" where torch does."""
        kernel = self._operations(self.checkpoint).kernel
        return "off" if kernel is None else kernel.level

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
        shape, size = self.checkpoint.shape, self.dtype.itemsize
        plain = estimate(shape, tokens, self.config.prefill_chunk, size)
        settings = self.speculation
        retrieval = draft = 0
        if has_middle(settings, tokens):
            retrieval = shape.kv_bytes(min(settings.budget, tokens) + TAIL + settings.chunk, size)
            retrieval += shape.kv_bytes(tokens // settings.chunk, size) // 2  # mean keys
        if self.draft is not None:
            room = settings.sink + 2 * settings.window + 2 * draft_chunk(settings)
            draft = estimate(self.draft.shape, room, draft_chunk(settings), size).total
        return replace(plain, retrieval=retrieval, draft=draft)

    def check_fit(self, tokens: int, memory_limit: int | None = None) -> None:
        """Raises OutOfMemory if a sequence of `tokens` does not fit the device (or `memory_limit` bytes of it)."""
        free = available(self.device)
        check_fit(self.estimate(tokens), free if memory_limit is None else min(free, memory_limit))

    def load(self, progress: Progress = lambda done, total: None) -> Engine:
        """Read the weights."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        model, draft = (self._load(checkpoint, progress) for checkpoint in (self.checkpoint, self.draft))
        return Engine(model, self.checkpoint.shape.eos_ids, self.config.prefill_chunk, draft)

    def _load(self, checkpoint: Checkpoint | None, progress: Progress) -> Model | None:
        if checkpoint is None:
            return None
        return load_model(checkpoint, self.dtype, self.device, progress, self._operations(checkpoint))

    def _operations(self, checkpoint: Checkpoint) -> Operations:
        """Each model has its own: they keep the memory of their results. Raises SettingsError."""
        return choose_operations(self.config.kernel, checkpoint.shape, self.dtype, self.device)

    def check_kernel(self) -> None:
        """Raises SettingsError if a level was asked for that cannot serve both models."""
        for name, checkpoint in (("", self.checkpoint), ("the draft model: ", self.draft)):
            try:
                if checkpoint is not None:
                    self._operations(checkpoint)
            except SettingsError as error:
                raise SettingsError(name + error.message, error.hint) from error


def open_model(
    config: EngineConfig,
    home: Path | None = None,
    progress: FetchProgress = silent,
    speculation: Speculation | None = None,
) -> OpenModel:
    """Find a model (fetching it if need be), and check its config, its headers, device, dtype and kernel.

    Args:
        home: triforce's cache folder; None for the platform's.
        progress: called while something is fetched.
        speculation: how it will decode; a draft model is found and checked as well.

    Raises:
        ModelNotFound, UnsupportedModel, CheckpointError, FetchError, SettingsError.
    """
    device = resolve_device(config.device)
    check_kernel(config.kernel)  # before a model is fetched for nothing
    checkpoint = open_checkpoint(locate(config.model, home, progress))
    check_tensors(checkpoint)
    settings = speculation or Speculation()
    draft = None
    if has_draft_model(settings):
        draft = _open_draft(settings.draft_model, home, progress)
    opened = OpenModel(config, checkpoint, device, resolve_dtype(config.dtype, device), settings, draft)
    opened.check_kernel()
    if draft is not None:
        check_draft(opened.tokenizer, Tokenizer(draft.load_tokenizer()), draft.shape, settings)
    return opened


def _open_draft(name: str, home: Path | None, progress: FetchProgress) -> Checkpoint:
    try:
        draft = open_checkpoint(locate(name, home, progress))
        check_tensors(draft)
    except TriforceError as error:
        raise type(error)(f"the draft model: {error.message}", error.hint.replace("--model", "--draft")) from error
    return draft


class Engine:
    """A loaded model, and a draft model if there is one. It knows tokens, not text.

    The caches of the last request are kept: what the next prompt shares with it is not run again. Two requests may run
    at once; the second one then has caches of its own.
    """

    def __init__(self, model: Model, eos_ids: Sequence[int], prefill_chunk: int, draft: Model | None = None) -> None:
        self.model = model
        self._draft = draft
        self._eos_ids = frozenset(eos_ids)
        self._prefill_chunk = prefill_chunk
        self._idle: Session | None = None

    def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        config: GenerationConfig,
        speculation: Speculation | None = None,
    ) -> Generator[Event, int | None]:
        """Prefill `ids`, then emit up to `config.max_new_tokens` tokens, a run of them at a time.

        Yields Prefilled, then Speculated and Tokens for every verification, then one Finished. An end-of-sequence token
        ends the run and is not emitted. Without a seed in `config`, the seed is 0. Stop strings are the text layer's
        (`text.stream_text`): `send(n)` in answer to Tokens says that of all the tokens emitted only the first n are
        kept, and that this is the end. Abandoning the iterator at any point is safe.
        """
        session = self._session(len(ids) + config.max_new_tokens)
        try:
            yield from session.generate(ids, sampling, config, speculation or Speculation(), self._eos_ids)
        finally:
            self._idle = session

    def replay(
        self, ids: Sequence[int], emitted: Sequence[int], sampling: Sampling | None = None, length: int = 0
    ) -> Replay:
        """Decode plainly and greedily after `ids`, with the penalty of `sampling`; compare with what was emitted.

        `length` is that which the sequence might have reached, prompt and `max_new_tokens`, where that is more than
        what there is: to some RoPE scalings it matters.
        """
        session = self._session(max(len(ids) + len(emitted), length))
        try:
            return replay(session.full, ids, emitted, sampling or Sampling(temperature=0))
        finally:
            self._idle = session

    def _session(self, capacity: int) -> Session:
        """Take the idle session, or make one if there is none that serves."""
        session, self._idle = self._idle, None
        if session is not None and session.serves(capacity):
            return session
        del session  # its memory first
        return Session(self.model, self._draft, capacity, self._prefill_chunk)

    def without_end(self) -> Engine:
        """The same models in an engine that no token ends, for benchmarks: all methods decode equally many tokens."""
        return Engine(self.model, (), self._prefill_chunk, self._draft)

    def describe(self) -> str:
        """Device, dtype and what computes, for people."""
        where = f"{self.model.device.type}, {str(self.model.dtype).removeprefix('torch.')}"
        kernel = self.model.operations.kernel
        if kernel is not None:
            return f"{where}, {kernel.level} kernel"
        native = multiplies_natively(self.model.device.type, self.model.dtype)
        return where + ("" if native else " (blocks of rows in float32)")
