"""Jobs over one model: it is planned and loaded for the longest sequence, and worked with; or planned alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from offload.settings.method_sizes import stored_tokens

from ..exit_codes import DONE
from ..input.prompt import PromptText
from ..options.command_request import OutputOptions, Request
from ..options.lossy_modes import lossy_modes
from ..output.plan_report import print_plan
from ..output.renderers import StreamRenderer, tokenizing
from ..output.terminal import Terminal
from .long_prompts import Notices, fit_prompt
from .model_request import ModelRequest, open_request
from .parallel import check_parallel
from .placement_checks import warn_of_chunks
from .plan import plan_run, plan_tiers
from .prompt_cache import LABEL, memory_limit, open_prompt_cache
from .text_generator import TextGenerator

Load = Callable[[], TextGenerator]


class Display(Protocol):
    """What shows that a model is being loaded: a Renderer, or a ProgressDisplay."""

    def loading(self, text: str) -> None:
        """Show this text, until something else is shown."""

    def close(self) -> None:
        """Erase everything, and draw nothing more."""


class Job:
    """A job for an opened model whose longest sequence is known: where all lies has been planned, nothing is loaded.

    Attributes:
        is_offloaded: whether keys and values, weights or experts lie outside of the device; unknown in a dry run.
    """

    def __init__(
        self, opened: ModelRequest, longest: int, terminal: Terminal, output: OutputOptions, display: Display
    ) -> None:
        """Plan for sequences of up to `longest` tokens, unless only the plan is wanted. Raises TriforceError."""
        self._opened, self._longest = opened, longest
        self._terminal, self._output, self._display = terminal, output, display
        stored = stored_tokens(opened.settings.speculation, longest)
        is_dry = opened.request.dry_run
        self._tiers = None if is_dry else plan_tiers(opened.model, opened.settings, stored, terminal)
        self.is_offloaded = self._tiers is not None
        settings = opened.settings
        warn_of_chunks(opened.model, settings, [settings.speculation], longest, self.is_offloaded, terminal)

    def parallel(self, wanted: int | str, sequences: int | None = None) -> int:
        """Return how many sequences run together, of so many. Raises as `check_parallel`.

        Buffers of offloaded keys and values are planned for one.
        """
        return 1 if self.is_offloaded else check_parallel(wanted, self._opened, self._longest, sequences)

    def run(self, work: Callable[[Load], int | None]) -> int:
        """Do the work, which is given what loads the model; return its exit code, DONE where it returns none.

        A dry run prints the plan instead. Raises TriforceError, BrokenPipeError, KeyboardInterrupt.
        """
        if not self._opened.request.dry_run:
            return work(self._load) or DONE
        report = plan_run(self._opened.model, self._opened.settings, self._longest, self._terminal)
        report = replace(report, arguments=self._opened.request.arguments)
        self._display.close()  # the plan is the output
        return print_plan(report, self._opened.request.command, self._terminal, self._output.json)

    def _load(self) -> TextGenerator:
        """Load the model for sequences of the longest one's length. Raises TriforceError."""
        opened, longest = self._opened, self._longest
        model, settings = opened.model, opened.settings
        is_exact = not lossy_modes(settings)
        self._display.loading(f"loading {settings.engine.model}")
        stored = stored_tokens(settings.speculation, longest)
        prompt_cache = open_prompt_cache(model, settings, opened.request.home, stored)
        started = time.perf_counter()
        room = model.kv_room(stored, memory_limit(model, settings, stored), int(opened.request.verify))
        engine = model.load(tiers=self._tiers, prompts=prompt_cache, capacity=longest if is_exact else 0)
        engine.reserve(longest)
        engine.limit_batches(room)
        return TextGenerator(opened, engine, prompt_cache, opened.open_s + time.perf_counter() - started)


def run_generation(
    text: PromptText, request: Request, terminal: Terminal, output: OutputOptions, renderer: StreamRenderer
) -> int:
    """Generate from one prompt, writing as it comes; return the exit code. Raises as `Job.run`."""
    opened = open_request(request, terminal, output.quiet)
    ids = opened.encode(text.text, tokenizing(renderer))
    if request.extend_context:
        opened = opened.stretched([ids], terminal)
    else:
        opened, ids = fit_prompt(text, opened, ids, Notices(terminal, renderer, output.quiet))
    prompt = opened.prompt(ids, text.text[:LABEL])
    opened.print_settings(prompt.new_tokens, terminal, output.verbose)

    def work(load: Load) -> None:
        load().generate(prompt, renderer)

    return Job(opened, prompt.length, terminal, output, renderer).run(work)
