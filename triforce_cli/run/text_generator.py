"""Texts from a loaded model, one prompt after the other: what is measured, written, kept and verified of each."""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from typing import Any

from offload.batching.request import BatchRequest
from offload.constraints.quotes import Quotation, quotations
from offload.engine import Engine
from offload.events import Event
from offload.loading.tokenizers.text_stream import TextLayer, TextPieces, stream_text
from offload.metrics import Meter, Summary
from offload.prompt_cache.prefill import PromptCache
from offload.settings.config import GenerationConfig
from offload.settings.constraint import QUOTE

from ..options.mode_checks import approximation_warnings
from ..output.renderers import Renderer
from ..output.statistics import quantized_warning
from .model_request import ModelRequest, Prompt
from .prompt_cache import short_label
from .verify import compare, refuse_loss, verification_fields


class TextRun:
    """The generation for a prompt, under way. Each of its events is to be observed once."""

    def __init__(self, opened: ModelRequest, prompt: Prompt, renderer: Renderer) -> None:
        self.opened, self.prompt, self.renderer = opened, prompt, renderer
        self.meter = Meter(len(prompt.ids))

    def _layer(self) -> TextLayer:
        # With --raw, nothing is thought: all text is the answer.
        stops = self.opened.settings.generation.stop
        return TextLayer.after(self.opened.model.tokenizer, self.prompt.ids, stops, not self.opened.request.raw)

    @property
    def config(self) -> GenerationConfig:
        """The generation's settings for the prompt."""
        return replace(self.opened.settings.generation, max_new_tokens=self.prompt.new_tokens)

    def text(self, tokens: Generator[Event, int | None]) -> Generator[Event, int | None]:
        """Return the engine's events with text between them, up to a stop string."""
        return stream_text(tokens, self._layer())

    def request(self, key: Hashable) -> BatchRequest:
        opened = self.opened
        return BatchRequest(key, self.prompt.ids, opened.sampling, self.config, opened.settings.speculation, self.text)

    def observe(self, event: Event) -> None:
        """Measure and render an event."""
        self.meter.observe(event)
        self.renderer.event(event)

    @property
    def has_ended(self) -> bool:
        return self.meter.finish_reason is not None

    def flush(self) -> None:
        """Render the text that is left of all measured tokens, when no more come.

        They are decoded anew: Ctrl-C may have come between tokens and their text, which are then nowhere else.
        """
        layer, meter = self._layer(), self.meter
        _, fed = layer.feed(meter.ids)
        held = TextPieces("", "", True) if fed.met else layer.flush()
        thought = (fed.thought + held.thought)[len("".join(meter.thoughts)) :]
        text = (fed.text + held.text)[len(meter.text) :]
        for event in TextPieces(thought, text, True, fed.thought_tokens - meter.thinking_tokens).events():
            self.observe(event)


class TextGenerator:
    """A loaded model that generates for one prompt after the other, and reuses the prefix shared with the last one.

    Attributes:
        engine: the model.
        prompt_cache: on disk, which the engine uses; None without one.
    """

    def __init__(
        self, opened: ModelRequest, engine: Engine, prompt_cache: PromptCache | None = None, load_s: float | None = None
    ) -> None:
        """`load_s`: seconds that finding, checking and loading the model took."""
        self._opened = opened
        self._load_s = load_s
        self.engine, self.prompt_cache = engine, prompt_cache
        self._agreement: float | None = None
        self._is_compared = False
        self._is_warned = False

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
        events = run.text(self.tokens(run))
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
                run.renderer.interrupt(self.summary(run))
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

    def tokens(self, run: TextRun) -> Generator[Event, int | None]:
        """Return the engine's events for a run, without text."""
        opened = run.opened
        return self.engine.generate(run.prompt.ids, opened.sampling, run.config, opened.settings.speculation)

    def prepare(self, prompt: Prompt, renderer: Renderer) -> None:
        """Do what is done once, with the first prompt: warn of lossy modes."""
        settings = self._opened.settings
        if settings.engine.quantize is not None and not self._is_compared:
            renderer.loading(f"comparing {settings.engine.quantize} with the original weights")
            self._agreement, self._is_compared = self._opened.model.agreement(self.engine.model, prompt.ids), True
            renderer.warn(quantized_warning(settings.engine.quantize, self._agreement))
        for warning in () if self._is_warned else approximation_warnings(settings):
            renderer.warn(warning)
        self._is_warned = True

    def begin(self, prompt: Prompt, renderer: Renderer, label: str = "", opened: ModelRequest | None = None) -> TextRun:
        """Return the run of a prompt, whose time begins now.

        `opened`: a request for the same model, with sampling and limits of its own.
        """
        run = TextRun(opened or self._opened, prompt, renderer)
        renderer.start(run.opened.run_facts(run.meter, self.engine, label))
        if self.prompt_cache is not None:
            self.prompt_cache.label = short_label(prompt.name or label)
        return run

    def finish(self, run: TextRun, batch_size: float = 1.0) -> str:
        """Render the end of a run, after its verification if that was asked for; return the whole text.

        `batch_size`: how many sequences ran together in the mean. Raises TriforceError as `generate`.
        """
        assert run.has_ended, "a generation ends with Finished"
        summary = self.summary(run, batch_size)
        if self._opened.request.verify:
            self._verify(run, summary)
        else:
            run.renderer.finish(summary)
        return run.meter.text

    def summary(self, run: TextRun, batch_size: float = 1.0) -> Summary:
        """Return the summary of a run, interrupted if it has not ended."""
        facts: dict[str, Any] = {"load_s": self._load_s, "agreement": self._agreement, "batch_size": batch_size}
        constraint = run.opened.sampling.constraint
        if constraint is not None and constraint.kind == QUOTE:
            parts = run.opened.request.parts
            facts["quotes"] = [_placed(each, parts) for each in quotations(run.meter.text, constraint.text)]
        facts = run.opened.summary_facts(run.prompt.new_tokens) | facts
        return run.meter.summary(run.meter.finish_reason or "interrupted", **facts)

    def _verify(self, run: TextRun, summary: Summary) -> None:
        """Finish with the comparison. Raises TriforceError after that if the output is not lossless."""
        model, prompt, renderer = self._opened.model, run.prompt, run.renderer
        renderer.verifying("decoding plainly, to compare")
        try:
            self.engine.forget()  # the comparison runs the prompt itself
            ended_by = model.checkpoint.shape.eos_ids if summary.finish_reason == "eos" else ()
            sampling, seed = run.opened.sampling, run.opened.settings.generation.seed
            replay = compare(self.engine, prompt.ids, run.meter.ids, sampling, ended_by, prompt.length, seed)
            verify = verification_fields(replay, model.tokenizer.decode, self.engine.describe())
        except KeyboardInterrupt:
            renderer.interrupt(summary)
            raise
        renderer.finish(replace(summary, verify=verify))
        refuse_loss(verify)


def _placed(quotation: Quotation, parts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return a quotation's fields; of several files, the name of the one that has it, and the place in that."""
    found = quotation._asdict()
    if len(parts) < 2 or quotation.start < 0:
        return found
    name, begin = [part for part in parts if part[1] <= quotation.start][-1]
    return found | {"start": quotation.start - begin, "end": quotation.end - begin, "document": name}
