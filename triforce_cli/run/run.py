"""A run of an opened model: planned for its longest sequence, loaded, and generating for one prompt after the other."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from offload.engine import Engine
from offload.metrics import Meter, Summary
from offload.prompt_cache.prompt import PromptCache
from offload.settings.method_sizes import stored_tokens

from ..options.checks import approximation_warnings, lossy_modes
from ..options.request import OutputOptions
from ..output.plan_text import print_plan
from ..output.progress import ProgressDisplay, RunFacts
from ..output.renderers import Renderer
from ..output.terminal import Terminal
from .finished_runs import record
from .generation import Generation
from .opened_request import OpenedRequest, Prompt
from .parallel import check_parallel
from .plan import packed_by_plan, plan_run, plan_tiers
from .prompt_cache import open_prompt_cache, short_label
from .verify import compare, refuse_loss, verification_fields

Display = Renderer | ProgressDisplay  # shows that a model is being loaded


class Run:
    """A model for sequences of up to some length: planned, then loaded, then generating. Reuses shared prefixes.

    Attributes:
        is_offloaded: whether keys and values, weights or experts lie outside of the device; unknown in a dry run.
        engine: the model, once it is loaded.
        prompt_cache: on disk, which the engine uses; None without one.
    """

    engine: Engine
    prompt_cache: PromptCache | None

    def __init__(
        self, opened: OpenedRequest, longest: int, terminal: Terminal, output: OutputOptions, display: Display
    ) -> None:
        """Plan for sequences of up to `longest` tokens, unless only the plan is wanted. Raises TriforceError."""
        self._stored = stored_tokens(opened.settings.speculation, longest)
        self._opened, self._tiers = opened, None
        if not opened.request.dry_run:
            self._opened = opened = packed_by_plan(opened, self._stored, terminal)
            self._tiers = plan_tiers(opened.model, opened.settings, self._stored, terminal)
        self._longest, self._terminal, self._output, self._display = longest, terminal, output, display
        self.is_offloaded = self._tiers is not None
        self._load_s = 0.0
        self._is_prepared = False

    def parallel(self, wanted: int | str, sequences: int | None = None) -> int:
        """Return how many sequences run together, of so many. Raises as `check_parallel`.

        Buffers of offloaded keys and values are planned for one.
        """
        return 1 if self.is_offloaded else check_parallel(wanted, self._opened, self._longest, sequences)

    def print_plan(self) -> int:
        """Print the plan, of a dry run; return the exit code. Raises SettingsError."""
        request = self._opened.request
        report = plan_run(self._opened.model, request.settings, self._longest, self._terminal)
        self._display.close()  # the plan is the output
        report = replace(report, arguments=request.words)
        return print_plan(report, request.command, self._terminal, self._output.json, self._output.verbose)

    def load(self) -> None:
        """Load the model for sequences of the longest one's length. Raises TriforceError."""
        opened, model, settings = self._opened, self._opened.model, self._opened.settings
        self._display.loading(f"loading {settings.engine.model}")
        self.prompt_cache = open_prompt_cache(model, settings, opened.request.home)
        started = time.perf_counter()
        room = model.kv_room(self._stored, settings.memory_limit(model.device.type), int(opened.request.verify))
        capacity = 0 if lossy_modes(settings) else self._longest
        self.engine = model.load(tiers=self._tiers, prompts=self.prompt_cache, capacity=capacity)
        self.engine.reserve(self._longest)
        self.engine.limit_batches(room)
        self._load_s = opened.open_s + time.perf_counter() - started

    def generate(self, prompt: Prompt, renderer: Renderer, label: str = "") -> Meter:
        """Generate for a prompt, rendering events as they come; return the meter, which has the whole text.

        `label` names the part of a document, where this is one. On Ctrl-C, partial statistics are rendered and
        KeyboardInterrupt is raised again. Raises TriforceError if the output was to be verified and is not lossless.
        """
        self.prepare(renderer)
        generation = self.begin(prompt, renderer, label)
        self.finish_writing(generation)
        return generation.meter

    def prepare(self, renderer: Renderer) -> None:
        """Warn of lossy modes, with the first prompt."""
        if self._is_prepared:
            return
        self._is_prepared = True  # even after an error, which is that of the first prompt alone
        for warning in approximation_warnings(self._opened.settings):
            renderer.warn(warning)

    def begin(
        self, prompt: Prompt, renderer: Renderer, label: str = "", opened: OpenedRequest | None = None
    ) -> Generation:
        """Return the generation for a prompt, whose time begins now.

        `opened`: a request for the same model, with sampling and limits of its own.
        """
        generation = Generation(opened or self._opened, prompt, renderer)
        method, engine = generation.opened.settings.speculation.method, self.engine
        pass_tokens = lambda: engine.model.pass_tokens  # noqa: E731
        renderer.start(RunFacts(generation.meter, prompt.new_tokens, method, label, pass_tokens))
        if self.prompt_cache is not None:
            self.prompt_cache.label = short_label(prompt.name or label)
        return generation

    def finish_writing(self, generation: Generation, keep: Callable[[], None] = lambda: None) -> None:
        """Generate all that is left; raise as `generate`. The generation keeps what Ctrl-C leaves.

        `keep` is called with all text written and the end not yet rendered: who sees the end may rely on it.
        """
        events = generation.text(generation.events(self.engine))
        with closing(events):  # at once: a verification, or the next request, is to have the engine's caches
            try:
                for event in events:
                    generation.observe(event)
                    if generation.has_ended:
                        break
            except KeyboardInterrupt:
                events.close()
                generation.flush()
                try:
                    keep()
                finally:
                    generation.renderer.interrupt(self.summary(generation))
                raise
        try:
            keep()
        finally:
            self.finish(generation)

    def finish(self, generation: Generation, batch_size: int = 1) -> str:
        """Render the end of a generation, after its verification if that was asked for; return the whole text.

        `batch_size`: how many sequences ran at its end. Raises TriforceError as `generate`.
        """
        assert generation.has_ended, "a generation ends with Finished"
        summary = self.summary(generation, batch_size)
        if not self.is_offloaded:
            record(summary)
        if self._opened.request.verify:
            self._verify(generation, summary)
        else:
            generation.renderer.finish(summary)
        return generation.meter.text

    def summary(self, generation: Generation, batch_size: int = 1) -> Summary:
        """Return the summary of a generation, interrupted if it has not ended."""
        fields = generation.summary_fields()
        if self.prompt_cache is not None and batch_size == 1:
            fields["saved_tokens"] = self.prompt_cache.saved
        fields |= {"load_s": self._load_s, "batch_size": batch_size}
        return generation.meter.summary(generation.meter.finish_reason or "interrupted", **fields)

    def _verify(self, generation: Generation, summary: Summary) -> None:
        """Finish with the comparison. Raises TriforceError after that if the output is not lossless."""
        opened, prompt, renderer = generation.opened, generation.prompt, generation.renderer
        renderer.verifying("decoding plainly, to compare")
        try:
            self.engine.forget()  # the comparison runs the prompt itself
            ended_by = opened.model.checkpoint.shape.eos_ids if summary.finish_reason == "eos" else ()
            more = opened.sampling, ended_by, prompt.length, opened.settings.generation.seed or 0
            replay = compare(self.engine, prompt.ids, generation.meter.ids, *more)
            verify = verification_fields(replay, opened.model.tokenizer.decode, self.engine.describe())
        except KeyboardInterrupt:
            renderer.interrupt(summary)
            raise
        renderer.finish(replace(summary, verify=verify))
        refuse_loss(verify)
