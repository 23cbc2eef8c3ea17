"""Generation: loads the model once, then generates for one prompt after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace

from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.metrics import Summary
from offload.model.decoder import QuantizedCopy
from offload.prompt_cache.prefill import PromptCache
from offload.settings.config import GenerationConfig
from offload.settings.method_sizes import uses_copy

from ..exit_codes import DONE
from ..input.prompt import PromptText
from ..options.approximate import approximation_warnings
from ..options.request import OutputOptions, Request
from ..output.renderers import Renderer, StreamRenderer, tokenizing
from ..output.statistics import quantized_warning
from ..output.terminal import Terminal
from .load import load_engine, plan_longest, print_dry_run
from .long_prompts import Notices, fit_prompt
from .model_request import ModelRequest, Prompt, open_request
from .prompt_cache import LABEL, short_label
from .text_run import TextRun
from .verify import compare, refuse_loss, verification_fields


class TextGenerator:
    """A loaded model that generates for one prompt after the other, and reuses the prefix shared with the last one."""

    def __init__(
        self, opened: ModelRequest, engine: Engine, prompt_cache: PromptCache | None = None, load_s: float | None = None
    ) -> None:
        self._opened = opened
        self._load_s = load_s
        self.engine = engine
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
        self.prepare(prompt, renderer)
        return self.run(self.begin(prompt, renderer, label))

    def run(self, run: TextRun, keep: Callable[[], None] = lambda: None) -> str:
        """Generate for a run that has begun; return and raise as `generate`. The run keeps what Ctrl-C leaves.

        `keep` is called with all text written and the end not yet rendered: who sees the end may rely on it.
        """
        prompt, renderer, settings = run.prompt, run.renderer, self._opened.settings
        tokens = self.engine.generate(prompt.ids, self._opened.sampling, self.config(prompt), settings.speculation)
        events = run.text(tokens)
        try:
            for event in events:
                run.observe(event)
                if run.has_ended:
                    break
        except KeyboardInterrupt:
            events.close()
            run.flush()
            try:
                keep()
            finally:
                renderer.interrupt(self.summary(run))
            raise
        except Exception:
            events.close()  # at once: the next request is to have the engine's caches
            raise
        if self._opened.request.verify:
            events.close()  # returns the session to the engine: a second one would double the KV memory
        try:
            keep()
        finally:
            text = self.finish(run)
        return text

    def use(self, opened: ModelRequest) -> None:
        """Generate with the sampling and the limits of another request from here on, for the same model."""
        self._opened = opened

    def request(self, key: Hashable, run: TextRun) -> BatchRequest:
        """Return what a batch is to do for a run that has begun."""
        opened, prompt = self._opened, run.prompt
        config, speculation = self.config(prompt), opened.settings.speculation
        return BatchRequest(key, prompt.ids, opened.sampling, config, speculation, run.text)

    def prepare(self, prompt: Prompt, renderer: Renderer) -> None:
        """Do what is done once, with the first prompt: warn of lossy modes, and make the copy that drafts."""
        settings = self._opened.settings
        if settings.engine.quantize is not None and not self._is_compared:
            renderer.loading(f"comparing {settings.engine.quantize} with the original weights")
            self._agreement, self._is_compared = self._opened.model.agreement(self.engine.model, prompt.ids), True
            renderer.warn(quantized_warning(settings.engine.quantize, self._agreement))
        for warning in () if self._is_warned else approximation_warnings(settings):
            renderer.warn(warning)
        self._is_warned = True
        self._prepare_copy(prompt, renderer)

    def begin(self, prompt: Prompt, renderer: Renderer, label: str = "") -> TextRun:
        """Return the run of a prompt, whose time begins now."""
        run = TextRun(self._opened, prompt, renderer)
        renderer.start(self._opened.run_facts(run.meter, self.engine, label))
        if self._prompt_cache is not None:
            self._prompt_cache.label = short_label(prompt.name or label)
        return run

    def finish(self, run: TextRun, batch_size: float = 1.0) -> str:
        """Render the end of a run, after its verification if that was asked for; return the whole text.

        `batch_size`: how many sequences ran together in the mean. Raises TriforceError as `generate`.
        """
        assert run.has_ended, "a generation ends with Finished"
        summary = self.summary(run, batch_size)
        if self._opened.request.verify:
            self._verify(run.prompt, run.meter.ids, summary, run.renderer)
        else:
            run.renderer.finish(summary)
        return run.meter.text

    def summary(self, run: TextRun, batch_size: float = 1.0) -> Summary:
        """Return the summary of a run, interrupted if it has not ended."""
        facts = {"load_s": self._load_s, "agreement": self._agreement, "batch_size": batch_size}
        if self._copy is not None:
            facts |= {"self_draft": self._copy.level, "self_agreement": self._copy.agreement}
        return run.summary(**self._opened.summary_facts(run.prompt.new_tokens) | facts)

    def config(self, prompt: Prompt) -> GenerationConfig:
        """Return the generation's settings for a prompt."""
        return replace(self._opened.settings.generation, max_new_tokens=prompt.new_tokens)

    def _prepare_copy(self, prompt: Prompt, renderer: Renderer) -> None:
        """Make the quantised copy of the weights that drafts, if there is to be one; its time is that of loading."""
        settings = self._opened.settings.speculation
        if not uses_copy(settings) or self._copy is not None:
            return
        renderer.loading("rounding a copy of the weights, to draft with")
        started = time.perf_counter()
        self._copy = self.engine.prepare(prompt.ids, self.config(prompt), settings)
        self._load_s = (self._load_s or 0.0) + time.perf_counter() - started

    def _verify(self, prompt: Prompt, emitted: list[int], summary: Summary, renderer: Renderer) -> None:
        """Finish with the comparison. Raises TriforceError after that if the output is not lossless."""
        model = self._opened.model
        renderer.verifying("decoding plainly, to compare")
        try:
            self.engine.forget()  # the comparison runs the prompt itself
            ended_by = model.checkpoint.shape.eos_ids if summary.finish_reason == "eos" else ()
            sampling, seed = self._opened.sampling, self._opened.settings.generation.seed
            replay = compare(self.engine, prompt.ids, emitted, sampling, ended_by, prompt.length, seed)
            verify = verification_fields(replay, model.tokenizer.decode, self.engine.describe())
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
    if opened.request.dry_run:
        return print_dry_run(opened, longest, terminal, output, renderer)
    loaded = load_engine(opened, longest, plan_longest(opened, longest, terminal), renderer)
    work(TextGenerator(opened, loaded.engine, loaded.prompt_cache, loaded.load_s))
    return DONE


def run_generation(
    text: PromptText, request: Request, terminal: Terminal, output: OutputOptions, renderer: StreamRenderer
) -> int:
    """Generate from one prompt, writing as it comes; return the exit code. Raises as `run_request`."""
    opened = open_request(request, terminal, output.quiet)
    ids = opened.encode(text.text, tokenizing(renderer))
    if request.extend_context:
        opened = opened.stretched([ids], terminal)
    else:
        opened, ids = fit_prompt(text, opened, ids, Notices(terminal, renderer, output.quiet))
    prompt = opened.prompt(ids, text.text[:LABEL])
    opened.print_settings(prompt.new_tokens, terminal, output.verbose)
    return run_request(
        opened, prompt.length, terminal, output, renderer, lambda generator: generator.generate(prompt, renderer)
    )
