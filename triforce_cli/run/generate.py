"""From checked prompts to the end of the output: load once, run them one after the other, tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from offload.engine import Engine
from offload.events import Event, Finished, Text, Tokens
from offload.loading.tokenizer import StopStrings, StreamDecoder, held_text, stream_text
from offload.metrics import Meter, Summary
from offload.prompt_cache.prefill import PromptCache

from ..exit_codes import DONE
from ..options.job import Job, Prompt, open_job, tell_settings
from ..options.request import Telling, Wish
from ..output.renderers import JsonRenderer, Renderer, TextRenderer
from ..output.terminal import Terminal
from .dry_run import tell_dry_run
from .following import tiers_for
from .prompt_cache import LABEL, beginning, prompts_for
from .verify import compare, described, refuse_loss


class Speaker:
    """A loaded model that answers prompts one after the other; what a prompt shares with the last is not read again."""

    def __init__(self, job: Job, engine: Engine, prompts: PromptCache | None = None) -> None:
        self.job = job
        self._engine = engine
        self._prompts = prompts

    def answer(self, prompt: Prompt, renderer: Renderer, label: str = "") -> str:
        """Generate, told as it comes; the whole text. `label` says which part of a larger work this is.

        Ctrl-C ends what is told with partial statistics, and goes on as KeyboardInterrupt. Raises TriforceError if
        the wish was to verify and something was lost.
        """
        job = self.job
        settings = job.wish.settings
        renderer.start(job.facts(prompt, label))
        if self._prompts is not None:
            self._prompts.label = beginning(prompt.name or label)
        meter = Meter(len(prompt.ids))
        config = replace(settings.generation, max_new_tokens=prompt.new_tokens)
        tokens = self._engine.generate(prompt.ids, job.sampling, config, settings.speculation)
        decoder, stops = StreamDecoder(job.opened.tokenizer.decode), StopStrings(settings.generation.stop)
        events = stream_text(tokens, decoder, stops)
        told = _Told()
        try:
            reason = told.all(events, meter, renderer)
        except KeyboardInterrupt:
            events.close()
            renderer.event(Text(held_text(decoder, stops)[0]))
            renderer.interrupt(meter.summary("interrupted", **job.summary_facts(prompt.new_tokens)))
            raise
        summary = meter.summary(reason, **job.summary_facts(prompt.new_tokens))
        if job.wish.verify:
            self._verify(prompt, told.tokens, summary, renderer)
        else:
            renderer.finish(summary)
        return told.text

    def _verify(self, prompt: Prompt, emitted: list[int], summary: Summary, renderer: Renderer) -> None:
        """Finish with the comparison. Raises TriforceError after that if something was lost."""
        job = self.job
        renderer.verifying("decoding plainly, to compare")
        try:
            ended_by = job.opened.checkpoint.shape.eos_ids if summary.finish_reason == "eos" else ()
            found = compare(self._engine, prompt.ids, emitted, job.sampling, ended_by, prompt.length)
            verify = described(found, job.opened.tokenizer.decode, self._engine.describe())
        except KeyboardInterrupt:
            renderer.interrupt(summary)
            raise
        renderer.finish(replace(summary, verify=verify))
        refuse_loss(verify)


class _Told:
    """What has been emitted while it was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""

    def all(self, events: Iterator[Event], meter: Meter, renderer: Renderer) -> str:
        """Every event to the meter and the renderer; the reason why it ended."""
        for event in events:
            meter.observe(event)
            renderer.event(event)
            if isinstance(event, Tokens):
                self.tokens += event.ids
            elif isinstance(event, Text):
                self.text += event.text
            elif isinstance(event, Finished):
                return event.reason
        raise AssertionError("a generation ends with Finished")


def renderer_for(terminal: Terminal, output: Telling) -> TextRenderer | JsonRenderer:
    """How the output is to be told."""
    return (JsonRenderer if output.json else TextRenderer)(terminal, output.quiet)


def run_checked(
    job: Job, longest: int, terminal: Terminal, output: Telling, renderer: Renderer, work: Callable[[Speaker], object]
) -> int:
    """Load the model for sequences of up to `longest` tokens and do the work, or tell the plan; the exit code.

    What does not fit into memory is found before loading. Raises TriforceError, BrokenPipeError, KeyboardInterrupt.
    """
    settings = job.wish.settings
    if job.wish.dry_run:
        return tell_dry_run(job.opened, settings, longest, terminal, output.json)
    tiers = tiers_for(job.opened, settings, longest, terminal)
    renderer.loading(f"loading {settings.engine.model}")
    prompts = prompts_for(job.opened, settings, job.wish.home)
    engine = job.opened.load(tiers=tiers, prompts=prompts)
    engine.reserve(longest)
    work(Speaker(job, engine, prompts))
    return DONE


def run_generation(text: str, wish: Wish, terminal: Terminal, output: Telling) -> int:
    """Generate from one prompt, writing as it comes; the exit code. Raises as `run_checked`."""
    renderer = renderer_for(terminal, output)
    with closing(renderer):
        job = open_job(wish, terminal, output.quiet)
        ids = job.encode(text)
        if wish.extend_context:
            job = job.stretched([ids], terminal)
        prompt = job.prompt(ids, text[:LABEL])
        if output.verbose:
            tell_settings(job, prompt.new_tokens, terminal)
        return run_checked(
            job, prompt.length, terminal, output, renderer, lambda speaker: speaker.answer(prompt, renderer)
        )
