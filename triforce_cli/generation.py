"""One generation from a prompt's text to the exit code: open, check, load, run, tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.config import Sampling
from offload.engine import Engine
from offload.errors import PromptError
from offload.events import Event, Finished, Text, Tokens
from offload.opening import OpenModel, open_model
from offload.parallel import ALONE, Group
from offload.statistics import Meter, Summary
from offload.text import StopStrings, StreamDecoder, Tokenizer, held_text, stream_text
from offload.tiers import TierSettings

from .dry_run import tell_dry_run
from .exit_codes import DONE, INTERRUPTED
from .fetching import FetchBar
from .following import tiers_for
from .launching import ranks_to_start
from .progress import RunFacts
from .ranks import check_alike
from .render import JsonRenderer, Renderer, TextRenderer
from .settings import Settings, refuse_unverifiable
from .terminal import Terminal
from .verification import compare, described, refuse_loss


@dataclass(frozen=True, slots=True)
class Request:
    """What the user wants said; `raw` bypasses the chat template, `verify` compares with plain decoding."""

    text: str
    system: str | None
    raw: bool
    settings: Settings
    home: Path | None
    verify: bool = False
    dry_run: bool = False  # tell the plan, and load nothing
    group: Group | None = None  # the ranks that share the model; None: this process has all of it


@dataclass(frozen=True, slots=True)
class Output:
    """How it is to be told."""

    json: bool
    quiet: bool
    verbose: bool


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that has been checked against its model: everything but the weights."""

    request: Request
    opened: OpenModel
    ids: list[int]
    sampling: Sampling
    new_tokens: int
    tiers: TierSettings | None

    @property
    def facts(self) -> RunFacts:
        settings = self.request.settings
        context, seed = self.opened.checkpoint.shape.context, settings.generation.seed
        model, method = settings.engine.model, settings.speculation.method
        on_gpu = self.opened.device.type == "cuda"
        in_use = partial(torch.cuda.memory_allocated, self.opened.device) if on_gpu else None
        return RunFacts(model, method, context, len(self.ids), seed or 0, in_use)

    def summary_facts(self) -> dict[str, Any]:
        settings = self.request.settings
        resolved = settings.described(self.sampling) | {
            "max_new_tokens": self.new_tokens,
            "device": self.opened.device.type,
            "dtype": str(self.opened.dtype).removeprefix("torch."),
            "kernel": self.opened.kernel,
            "context": self.opened.checkpoint.shape.context,
            "raw": self.request.raw,
            "system": self.request.system,
        }
        return {
            "seed": settings.generation.seed,
            "method": settings.speculation.method,
            "model": settings.engine.model,
            "peak_memory_bytes": peak_memory(self.opened.device),
            "settings": resolved,
        }


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


def run_request(request: Request, terminal: Terminal, output: Output) -> int:
    """Generate, writing as it comes; returns the exit code. Raises TriforceError, BrokenPipeError."""
    renderer = (JsonRenderer if output.json else TextRenderer)(terminal, output.quiet)
    with closing(renderer):
        job = _check(request, terminal, output.quiet)
        if output.verbose:
            _tell_settings(job, terminal)
        if request.dry_run:
            return tell_dry_run(job.opened, request.settings, len(job.ids) + job.new_tokens, terminal, output.json)
        return _generate(job, renderer)


def _check(request: Request, terminal: Terminal, quiet: bool) -> _Job:
    """Everything that can go wrong before the weights are loaded goes wrong here."""
    settings = request.settings
    with FetchBar(terminal, shown=not quiet) as progress:
        opened = open_model(settings.engine, request.home, progress, settings.speculation, request.group or ALONE)
    check_alike(opened, settings, {"system": request.system, "raw": request.raw, "verify": request.verify})
    if settings.profile.gpus > 1 and opened.group.size == 1 and not ranks_to_start(settings):
        terminal.warn(f"profile {settings.profile.name} describes {settings.profile.gpus} GPUs; the first one is used")
    sampling = settings.sampling(opened.sampling)
    if request.verify:
        refuse_unverifiable(sampling)
    ids = _encode(opened.tokenizer, request)
    exact = "max_new_tokens" in settings.values
    new_tokens = opened.new_tokens(len(ids), settings.generation.max_new_tokens, exact)
    tiers = None if request.dry_run else tiers_for(opened, settings, len(ids) + new_tokens, terminal)
    return _Job(request, opened, ids, sampling, new_tokens, tiers)


def _encode(tokenizer: Tokenizer, request: Request) -> list[int]:
    if request.system is not None and not tokenizer.has_chat_template:
        raise PromptError("this model has no chat template, so no place for --system", "put it into the prompt itself")
    if request.raw or not tokenizer.has_chat_template:
        return tokenizer.encode(request.text, special_tokens=True)
    return tokenizer.chat(request.text, request.system)


def _tell_settings(job: _Job, terminal: Terminal) -> None:
    origins = job.request.settings.origins
    for name, value in job.summary_facts()["settings"].items():
        origin = origins.get(name, "")
        terminal.note(f"{name}: {value}" + (f"  ({origin})" if origin else ""))


def _generate(job: _Job, renderer: Renderer) -> int:
    settings = job.request.settings
    renderer.loading(f"loading {settings.engine.model}")
    engine = job.opened.load(tiers=job.tiers)
    renderer.start(job.facts)
    meter = Meter(len(job.ids))
    config = replace(settings.generation, max_new_tokens=job.new_tokens)
    tokens = engine.generate(job.ids, job.sampling, config, settings.speculation)
    decoder, stops = StreamDecoder(job.opened.tokenizer.decode), StopStrings(settings.generation.stop)
    events = stream_text(tokens, decoder, stops)
    emitted: list[int] = []
    try:
        reason = _tell(events, meter, renderer, emitted)
    except KeyboardInterrupt:
        events.close()
        renderer.event(Text(held_text(decoder, stops)[0]))
        renderer.interrupt(meter.summary("interrupted", **job.summary_facts()))
        return INTERRUPTED
    summary = meter.summary(reason, **job.summary_facts())
    if job.request.verify:
        return _verify(job, engine, emitted, summary, renderer)
    renderer.finish(summary)
    return DONE


def _verify(job: _Job, engine: Engine, emitted: list[int], summary: Summary, renderer: Renderer) -> int:
    """Finish with the comparison. Raises TriforceError after that if something was lost."""
    renderer.verifying("decoding plainly, to compare")
    try:
        ended_by = job.opened.checkpoint.shape.eos_ids if summary.finish_reason == "eos" else ()
        found = compare(engine, job.ids, emitted, job.sampling, ended_by, len(job.ids) + job.new_tokens)
        verify = described(found, job.opened.tokenizer.decode)
    except KeyboardInterrupt:
        renderer.interrupt(summary)
        return INTERRUPTED
    renderer.finish(replace(summary, verify=verify))
    refuse_loss(verify)
    return DONE


def _tell(events: Iterator[Event], meter: Meter, renderer: Renderer, emitted: list[int]) -> str:
    """Every event to the meter and the renderer, every token to `emitted`; the reason why it ended."""
    for event in events:
        meter.observe(event)
        renderer.event(event)
        if isinstance(event, Tokens):
            emitted += event.ids
        elif isinstance(event, Finished):
            return event.reason
    raise AssertionError("a generation ends with Finished")
