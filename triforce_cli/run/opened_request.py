"""A request whose model has been opened: all checks that need no weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.api.loader import open_model
from offload.api.opened_model import OpenModel
from offload.errors import PromptError
from offload.loading.tokenizers.tokenizer import EncodingProgress
from offload.parallel import ALONE
from offload.settings.config import Sampling, Speculation
from offload.settings.method_sizes import forgets
from offload.units import counted

from ..distributed.launch import ranks_to_start
from ..distributed.rank import broadcast, check_same_command
from ..options.checks import lossy_modes, quantized_kv, refuse_unverifiable
from ..options.config_file import settings_lines
from ..options.declarations import AUTO
from ..options.request import Request
from ..options.settings import Settings
from ..output.progress import DownloadBar
from ..output.terminal import Terminal
from .processor import peak_memory

_FLAGS = ("raw", "system", "think", "truncate")
_COMPARED = (*_FLAGS, "verify", "extend_context")  # the same on all ranks


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, and how many may follow. `name` is for people."""

    ids: list[int]
    new_tokens: int
    name: str = ""

    @property
    def length(self) -> int:
        """Tokens that the sequence may reach."""
        return len(self.ids) + self.new_tokens


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """A request with its model, opened but not loaded, and the sampling of both."""

    request: Request
    model: OpenModel
    sampling: Sampling
    open_s: float = 0.0  # seconds that finding and checking the model took

    @property
    def settings(self) -> Settings:
        return self.request.settings

    @property
    def context(self) -> int:
        """The longest sequence in tokens, prompt and answer."""
        return self.model.checkpoint.shape.context

    def overridden(self, options: Mapping[str, Any], seed: Callable[[], int], **changes: Any) -> OpenedRequest:
        """Return the request with other options of sampling and generation, and other values of `Request`.

        `seed` gives one where neither the options nor the command do. Raises SettingsError.
        """
        settings = self.settings.overridden(options, seed)
        request = replace(self.request, settings=settings, **changes)
        return replace(self, request=request, sampling=sampling_of(request, self.model))

    def encode(self, text: str, progress: EncodingProgress | None = None) -> list[int]:
        """Return a prompt's tokens, in the chat template unless the request is raw or the model has none.

        `progress` is called while a long text is encoded.
        Rank 0 encodes for all: a template may read the clock. Raises PromptError.
        """
        return broadcast(self.request.group, lambda: self._encode(text, progress))

    def _encode(self, text: str, progress: EncodingProgress | None) -> list[int]:
        tokenizer, request = self.model.tokenizer, self.request
        if tokenizer.has_chat_template and not request.raw:
            return tokenizer.chat(text, request.system, progress, self.think)
        if request.system is not None:
            raise PromptError("this model has no chat template, which --system needs", "put it into the prompt itself")
        if request.think != AUTO:
            raise PromptError("this model has no chat template, which --think needs", "leave --think out")
        return tokenizer.encode(text, True, progress)

    @property
    def think(self) -> bool | None:
        """Return whether the model shall think before it answers; None leaves that to its chat template."""
        return {"on": True, "off": False}.get(self.request.think)

    def prompt(self, ids: list[int], name: str = "") -> Prompt:
        """Return the prompt with the number of tokens that may follow. Raises PromptError beyond the context."""
        exact = "max_new_tokens" in self.settings.values
        return Prompt(ids, self.model.new_tokens(len(ids), self.settings.generation.max_new_tokens, exact), name)

    def stretched(self, prompts: Sequence[list[int]], terminal: Terminal) -> OpenedRequest:
        """Return the request with a context for the longest prompt and its answer; warn if that extends the model's.

        A cache that forgets needs no longer context.
        """
        if forgets(self.settings.speculation):
            return self
        longest = max(map(len, prompts)) + self.settings.generation.max_new_tokens
        return replace(self, model=stretch(self.model, longest, terminal))

    def summary_facts(self, new_tokens: int) -> dict[str, Any]:
        """Return the fields of a run's summary that the meter does not know."""
        return {
            "seed": self.settings.generation.seed,
            "sampling": self.sampling.kind,
            "method": self.settings.speculation.method,
            "exact": not lossy_modes(self.settings),
            "approximate": self.settings.speculation.approximate,
            "kv": quantized_kv(self.settings),
            "model": self.settings.engine.model,
            "quantize": self.settings.engine.quantize,
            "peak_memory_bytes": peak_memory(self.model.device),
            "settings": self.resolved(new_tokens),
        }

    def resolved(self, new_tokens: int) -> dict[str, Any]:
        """Return every setting by name, as resolved."""
        return self.settings.described(self.sampling) | {
            "max_new_tokens": new_tokens,
            "device": self.model.device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "kernel": self.model.kernel,
            "context": self.context,
            **{name: getattr(self.request, name) for name in _FLAGS},
        }

    def print_settings(self, new_tokens: int, terminal: Terminal, verbose: int) -> None:
        """Print settings to stderr, each with its origin: with 1 those that are not defaults, with 2 all."""
        if not verbose:
            return
        rows = [(name, value, self._origin(name)) for name, value in self.resolved(new_tokens).items()]
        shown = [row for row in rows if verbose > 1 or row[-1] != "default"]
        for line in settings_lines(shown):
            terminal.note(line)
        if len(shown) < len(rows):
            terminal.note(f"{counted(len(rows) - len(shown), 'more setting')} as by default (-vv lists all)")

    def _origin(self, name: str) -> str:
        """Return what gave a setting its value: flag, environment, config, profile, model or default."""
        usual, request = Sampling(), self.request
        if name in self.settings.origins:
            return self.settings.origins[name]
        if name in _FLAGS:
            return "flag" if getattr(request, name) not in (None, False, AUTO) else "default"
        if name == "context":
            return "flag" if request.extend_context else "model"
        if name == "seed":
            return "random"
        if name == "coupled":
            return "--seed" if self.sampling.coupled else "default"
        return "model" if getattr(self.model.sampling, name, None) != getattr(usual, name, None) else "default"


def stretch(model: OpenModel, tokens: int, terminal: Terminal) -> OpenModel:
    """Return the model with a context for `tokens`; warn if it is stretched. Raises UnsupportedModel."""
    stretched = model.stretched(tokens)
    if stretched is not model:
        before, after = model.checkpoint.shape.context, stretched.checkpoint.shape.context
        terminal.warn(
            f"the context is extended from {before:,} to {after:,} tokens (YaRN, factor "
            f"{after // before}): the model was not trained for that, and answers get worse"
        )
    return stretched


def open_request(request: Request, terminal: Terminal, quiet: bool) -> OpenedRequest:
    """Find and check the model of a request that generates text. Raises TriforceError."""
    settings, started = request.settings, time.perf_counter()
    compared = {name: getattr(request, name) for name in _COMPARED}
    model = open_shared_model(request, settings.speculation, compared, terminal, quiet)
    open_s = time.perf_counter() - started
    if settings.profile.gpus > 1 and model.group.size == 1 and not ranks_to_start(settings):
        terminal.warn(f"profile {settings.profile.name} describes {settings.profile.gpus} GPUs; the first one is used")
    sampling = sampling_of(request, model)
    if request.verify:
        refuse_unverifiable(settings, sampling)
    if model.checkpoint.skipped and not quiet:
        count = counted(model.checkpoint.skipped, "tensor")
        parts = "such as for images or for predicting several tokens"
        terminal.note(f"the text part of the model runs; {count} of its other parts, {parts}, not loaded")
    return OpenedRequest(request, model, sampling, open_s)


def sampling_of(request: Request, model: OpenModel) -> Sampling:
    """Return the sampling of a request's answers. Raises SettingsError for a constraint that they cannot meet."""
    sampling = request.settings.sampling(model.sampling)
    if sampling.constraint is None:
        return sampling
    model.constraints.check(sampling.constraint)
    return sampling.in_chat(not request.raw and model.tokenizer.has_chat_template)


def open_shared_model(
    request: Request, speculation: Speculation, compared: Mapping[str, Any], terminal: Terminal, quiet: bool
) -> OpenModel:
    """Find and check the model, fetching it if need be; all ranks must have opened it with the same command.

    `compared` has further values that must be the same on all ranks. Raises TriforceError.
    """
    settings = request.settings
    with DownloadBar(terminal, shown=not quiet) as progress:
        model = open_model(settings.engine, request.home, progress, speculation, request.group or ALONE)
    check_same_command(model, settings, compared)
    return model
