"""What a command line asks, checked against its model: everything that can go wrong before the weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.config import Sampling
from offload.errors import PromptError
from offload.loader import OpenModel, open_model
from offload.parallel import ALONE

from ..distributed.launch import ranks_to_start
from ..distributed.rank import check_alike, told
from ..output.fetching import FetchBar
from ..output.progress import RunFacts
from ..output.terminal import Terminal
from .request import Wish
from .settings import refuse_unverifiable


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request, and how many may follow. `name` is for people."""

    ids: list[int]
    new_tokens: int
    name: str = ""

    @property
    def length(self) -> int:
        """Tokens that the sequence may reach."""
        return len(self.ids) + self.new_tokens


@dataclass(frozen=True, slots=True)
class Job:
    """A wish and the model for it, opened but not loaded."""

    wish: Wish
    opened: OpenModel
    sampling: Sampling

    @property
    def context(self) -> int:
        """The longest sequence in tokens, prompt and answer."""
        return self.opened.checkpoint.shape.context

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, with the chat template if the wish and the model have it. Raises PromptError.

        Rank 0's, for all: a template may ask the clock.
        """
        return told(self.wish.group, lambda: self._encode(text))

    def _encode(self, text: str) -> list[int]:
        tokenizer, system = self.opened.tokenizer, self.wish.system
        if system is not None and not tokenizer.has_chat_template:
            raise PromptError(
                "this model has no chat template, so no place for --system", "put it into the prompt itself"
            )
        if self.wish.raw or not tokenizer.has_chat_template:
            return tokenizer.encode(text, special_tokens=True)
        return tokenizer.chat(text, system)

    def prompt(self, ids: list[int], name: str = "") -> Prompt:
        """Raises PromptError for what exceeds the context."""
        settings = self.wish.settings
        exact = "max_new_tokens" in settings.values
        return Prompt(ids, self.opened.new_tokens(len(ids), settings.generation.max_new_tokens, exact), name)

    def stretched(self, prompts: Sequence[list[int]], terminal: Terminal) -> Job:
        """With a context for the longest of these prompts and its answer, with a warning if that is not its own."""
        longest = max(map(len, prompts)) + self.wish.settings.generation.max_new_tokens
        opened = self.opened.stretched(longest)
        if opened is self.opened:
            return self
        job = replace(self, opened=opened)
        terminal.warn(
            f"the context is stretched from {self.context:,} to {job.context:,} tokens "
            f"(YaRN, factor {job.context // self.context}): the model was not trained for that, and answers get worse"
        )
        return job

    def facts(self, prompt: Prompt, label: str = "") -> RunFacts:
        """For the display."""
        settings = self.wish.settings
        on_gpu = self.opened.device.type == "cuda"
        in_use = partial(torch.cuda.memory_allocated, self.opened.device) if on_gpu else None
        return RunFacts(
            settings.engine.model,
            settings.speculation.method,
            self.context,
            len(prompt.ids),
            settings.generation.seed or 0,
            in_use,
            label,
        )

    def summary_facts(self, new_tokens: int) -> dict[str, Any]:
        """What the summary of a run says beside its numbers."""
        settings = self.wish.settings
        return {
            "seed": settings.generation.seed,
            "method": settings.speculation.method,
            "model": settings.engine.model,
            "peak_memory_bytes": peak_memory(self.opened.device),
            "settings": self.resolved(new_tokens),
        }

    def resolved(self, new_tokens: int) -> dict[str, Any]:
        """Every setting by name, as it has come out."""
        return self.wish.settings.described(self.sampling) | {
            "max_new_tokens": new_tokens,
            "device": self.opened.device.type,
            "dtype": str(self.opened.dtype).removeprefix("torch."),
            "kernel": self.opened.kernel,
            "context": self.context,
            "raw": self.wish.raw,
            "system": self.wish.system,
        }


def open_job(wish: Wish, terminal: Terminal, quiet: bool) -> Job:
    """Find and check the model. Raises TriforceError."""
    settings = wish.settings
    with FetchBar(terminal, shown=not quiet) as progress:
        opened = open_model(settings.engine, wish.home, progress, settings.speculation, wish.group or ALONE)
    check_alike(opened, settings, {name: getattr(wish, name) for name in ("system", "raw", "verify", "extend_context")})
    if settings.profile.gpus > 1 and opened.group.size == 1 and not ranks_to_start(settings):
        terminal.warn(f"profile {settings.profile.name} describes {settings.profile.gpus} GPUs; the first one is used")
    sampling = settings.sampling(opened.sampling)
    if wish.verify:
        refuse_unverifiable(sampling)
    return Job(wish, opened, sampling)


def tell_settings(job: Job, new_tokens: int, terminal: Terminal) -> None:
    """Every setting on stderr, and where it came from."""
    origins = job.wish.settings.origins
    for name, value in job.resolved(new_tokens).items():
        origin = origins.get(name, "")
        terminal.note(f"{name}: {value}" + (f"  ({origin})" if origin else ""))


def peak_memory(device: torch.device) -> int:
    """The most memory held so far, in bytes: on a GPU by torch, else resident in this process.

    Not ru_maxrss: that survives exec and may be the parent's. Where the system keeps no peak, what it is now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
