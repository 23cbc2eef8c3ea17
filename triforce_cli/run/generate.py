"""Generation: loads the model once, then generates for one prompt after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from offload.config import GenerationConfig
from offload.decoder import QuantizedCopy
from offload.engine import Engine
from offload.events import Text
from offload.levels import stored_tokens, uses_copy
from offload.loading.tokenizer import StopStrings, StreamDecoder, held_text, stream_text
from offload.metrics import Meter, Summary
from offload.prompt_cache.prefill import PromptCache

from ..exit_codes import DONE
from ..options.approximate import approximation_warnings, lossy_modes
from ..options.request import OutputOptions, Request
from ..output.agreement import quantized_warning
from ..output.plan import print_plan
from ..output.renderers import Renderer, StreamRenderer
from ..output.terminal import Terminal
from .model_request import ModelRequest, Prompt, open_request
from .plan import plan_run, plan_tiers
from .prompt_cache import LABEL, open_prompt_cache, short_label
from .verify import compare, refuse_loss, verification_fields


class TextGenerator:
    """A loaded model that generates for one prompt after the other, and reuses the prefix shared with the last one."""

    def __init__(
        self, opened: ModelRequest, engine: Engine, prompt_cache: PromptCache | None = None, load_s: float | None = None
    ) -> None:
        self._opened = opened
        self._load_s = load_s
        self._engine = engine
        self._prompt_cache = prompt_cache
        self._agreement: float | None = None
        self._is_compared = False
        self._is_warned = False
        self._copy: QuantizedCopy | None = None  # that drafts, once it has been made

    def generate(self, prompt: Prompt, renderer: Renderer, label: str = "") -> str:
        """Generate for a prompt, rendering events as they come; return the whole text.

        `label` names the part of a document, where this is one. On Ctrl-C, partial statistics are rendered and
        KeyboardInterrupt is raised again. Raises TriforceError if the output was to be verified and is not lossless.
        """
        opened, settings = self._opened, self._opened.settings
        if settings.engine.quantize is not None and not self._is_compared:
            renderer.loading(f"comparing {settings.engine.quantize} with the original weights")
            self._agreement, self._is_compared = opened.model.agreement(self._engine.model, prompt.ids), True
            renderer.warn(quantized_warning(settings.engine.quantize, self._agreement))
        for warning in () if self._is_warned else approximation_warnings(settings):
            renderer.warn(warning)
        self._is_warned = True
        config = replace(settings.generation, max_new_tokens=prompt.new_tokens)
        self._prepare_copy(prompt, config, renderer)
        meter = Meter(len(prompt.ids))
        renderer.start(opened.run_facts(meter, self._engine, label))
        if self._prompt_cache is not None:
            self._prompt_cache.label = short_label(prompt.name or label)
        tokens = self._engine.generate(prompt.ids, opened.sampling, config, settings.speculation)
        decoder, stops = StreamDecoder(opened.model.tokenizer.decode), StopStrings(settings.generation.stop)
        events = stream_text(tokens, decoder, stops)
        try:
            for event in meter.watch(events):
                renderer.event(event)
                if meter.finish_reason is not None:
                    break
        except KeyboardInterrupt:
            events.close()
            for event in meter.watch([Text(held_text(decoder, stops)[0])]):
                renderer.event(event)
            renderer.interrupt(meter.summary("interrupted", **self._facts(prompt)))
            raise
        assert meter.finish_reason is not None, "a generation ends with Finished"
        summary = meter.summary(meter.finish_reason, **self._facts(prompt))
        if opened.request.verify:
            events.close()  # returns the session to the engine: a second one would double the KV memory
            self._verify(prompt, meter.ids, summary, renderer)
        else:
            renderer.finish(summary)
        return meter.text

    def _prepare_copy(self, prompt: Prompt, config: GenerationConfig, renderer: Renderer) -> None:
        """Make the quantised copy of the weights that drafts, if there is to be one; its time is that of loading."""
        settings = self._opened.settings.speculation
        if not uses_copy(settings) or self._copy is not None:
            return
        renderer.loading("rounding a copy of the weights, to draft with")
        started = time.perf_counter()
        self._copy = self._engine.prepare(prompt.ids, config, settings)
        self._load_s = (self._load_s or 0.0) + time.perf_counter() - started

    def _facts(self, prompt: Prompt) -> dict[str, Any]:
        """Return what the summary of a generation contains beside its numbers."""
        facts = {"load_s": self._load_s, "agreement": self._agreement}
        if self._copy is not None:
            facts |= {"self_draft": self._copy.level, "self_agreement": self._copy.agreement}
        return self._opened.summary_facts(prompt.new_tokens) | facts

    def _verify(self, prompt: Prompt, emitted: list[int], summary: Summary, renderer: Renderer) -> None:
        """Finish with the comparison. Raises TriforceError after that if the output is not lossless."""
        model = self._opened.model
        renderer.verifying("decoding plainly, to compare")
        try:
            self._engine.forget()  # the comparison runs the prompt itself
            ended_by = model.checkpoint.shape.eos_ids if summary.finish_reason == "eos" else ()
            sampling, seed = self._opened.sampling, self._opened.settings.generation.seed
            replay = compare(self._engine, prompt.ids, emitted, sampling, ended_by, prompt.length, seed)
            verify = verification_fields(replay, model.tokenizer.decode, self._engine.describe())
        except KeyboardInterrupt:
            renderer.interrupt(summary)
            raise
        renderer.finish(replace(summary, verify=verify))
        refuse_loss(verify)


def run_request(
    opened: ModelRequest,
    longest: int,
    terminal: Terminal,
    output: OutputOptions,
    renderer: Renderer,
    work: Callable[[TextGenerator], object],
) -> int:
    """Load the model for sequences of up to `longest` tokens and do the work; return the exit code.

    A dry run prints the plan instead. What does not fit into memory is an error before loading.
    Raises TriforceError, BrokenPipeError, KeyboardInterrupt.
    """
    model, settings = opened.model, opened.settings
    if opened.request.dry_run:
        report = plan_run(model, settings, longest, terminal)
        report = replace(report, arguments=opened.request.arguments)
        renderer.close()  # the plan is the output
        return print_plan(report, opened.request.command, terminal, output.json)
    is_exact = not lossy_modes(settings)
    tiers = plan_tiers(model, settings, stored_tokens(settings.speculation, longest), terminal)
    renderer.loading(f"loading {settings.engine.model}")
    prompt_cache = open_prompt_cache(model, settings, opened.request.home) if is_exact else None
    started = time.perf_counter()
    engine = model.load(tiers=tiers, prompts=prompt_cache, capacity=longest if is_exact else 0)
    engine.reserve(longest)
    load_s = opened.open_s + time.perf_counter() - started
    work(TextGenerator(opened, engine, prompt_cache, load_s))
    return DONE


def run_generation(
    text: str, request: Request, terminal: Terminal, output: OutputOptions, renderer: StreamRenderer
) -> int:
    """Generate from one prompt, writing as it comes; return the exit code. Raises as `run_request`."""
    opened = open_request(request, terminal, output.quiet)
    ids = opened.encode(text)
    if request.extend_context:
        opened = opened.stretched([ids], terminal)
    prompt = opened.prompt(ids, text[:LABEL])
    if output.verbose:
        opened.print_settings(prompt.new_tokens, terminal)
    return run_request(
        opened, prompt.length, terminal, output, renderer, lambda generator: generator.generate(prompt, renderer)
    )
