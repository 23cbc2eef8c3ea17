"""Jobs over one model: planned and loaded for the longest sequence, and worked with; and how many run together."""

import time
from collections.abc import Callable
from dataclasses import replace

from offload.api.opened_model import OpenModel
from offload.errors import OutOfMemory, SettingsError
from offload.settings.config import Placement
from offload.settings.method_sizes import stored_tokens
from offload.units import counted, size_text

from ..input.documents import PromptText
from ..options.command_request import OutputOptions, Request
from ..options.declarations import AUTO
from ..options.mode_checks import lossy_modes, warn_of_chunks
from ..options.settings import Settings
from ..output.plan_report import print_plan
from ..output.progress import ProgressDisplay
from ..output.renderers import Renderer, tokenizing
from ..output.terminal import Terminal
from ..signals import DONE
from .long_prompts import Notices, fit_prompt
from .model_request import ModelRequest, open_request
from .plan import packed_by_plan, plan_run, plan_tiers
from .prompt_cache import LABEL, open_prompt_cache
from .text_generator import TextGenerator

MOST = 8  # that `auto` runs together: beyond, a pass of one row each is bound by arithmetic on a CPU


def fitting_sequences(opened: ModelRequest, tokens: int) -> int:
    """Return how many sequences of `tokens` fit the memory beside the weights, at least 1.

    Each is counted with keys and values of its own, also of a beginning that it shares with others.
    """
    return _fitting(opened.model, opened.settings, tokens)


def check_parallel(wanted: int | str, opened: ModelRequest, tokens: int, sequences: int | None = None) -> int:
    """Return how many sequences of up to `tokens` run together.

    There are `sequences` of them, None if that is not known yet. Raises SettingsError where only one can run at a time,
    OutOfMemory if as many as are wanted do not fit.
    """
    reason = _alone(opened)
    if wanted == 1 or (wanted == AUTO and reason):
        return 1
    if reason:
        raise SettingsError(f"--parallel {wanted} cannot be used with {reason}", "leave one of the two out")
    spare = 1 if opened.request.verify else 0  # plain decoding, to compare, has caches of its own
    most = MOST if wanted == AUTO else int(wanted)
    most = most if sequences is None else min(most, sequences)
    if wanted == AUTO:
        return min(most, max(fitting_sequences(opened, tokens) - spare, 1))
    check_sequences(opened.model, opened.settings, tokens, most, "--parallel", spare)
    return most


def check_sequences(
    model: OpenModel, settings: Settings, tokens: int, sequences: int, option: str, spare: int = 0
) -> None:
    """Raise OutOfMemory with the numbers if so many sequences of `tokens` do not fit, beside `spare` further ones.

    `option` is what asks for them.
    """
    fitting = max(_fitting(model, settings, tokens) - spare, 1)
    if sequences <= fitting:
        return
    one, two = (model.estimate(tokens).for_sequences(count).total for count in (1, 2))
    limit = settings.memory_limit(model.device.type)
    room = "the free memory" if limit is None else size_text(limit)
    raise OutOfMemory(
        f"not enough memory for {sequences} sequences of {counted(tokens, 'token')}: about {size_text(one)} "
        f"for the first and {size_text(two - one)} for each further one, in {room}",
        f"use {option} {fitting}, or shorter texts",
    )


def _alone(opened: ModelRequest) -> str:
    """Return why only one sequence can run at a time; "" if several can."""
    if opened.model.group.size > 1:
        return "several ranks"
    placement = replace(opened.settings.placement, memory=None, host_memory=None, experts="auto")
    return "" if placement in (Placement(), Placement(offload="none")) else "offloaded keys and values"


def _fitting(model: OpenModel, settings: Settings, tokens: int) -> int:
    return max(model.fitting_sequences(tokens, settings.memory_limit(model.device.type)), 1)


Load = Callable[[], TextGenerator]
Display = Renderer | ProgressDisplay  # shows that a model is being loaded


class Job:
    """A job for an opened model whose longest sequence is known: where all lies has been planned, nothing is loaded.

    Attributes:
        is_offloaded: whether keys and values, weights or experts lie outside of the device; unknown in a dry run.
    """

    def __init__(
        self, opened: ModelRequest, longest: int, terminal: Terminal, output: OutputOptions, display: Display
    ) -> None:
        """Plan for sequences of up to `longest` tokens, unless only the plan is wanted. Raises TriforceError."""
        stored = stored_tokens(opened.settings.speculation, longest)
        is_dry = opened.request.dry_run
        opened = opened if is_dry else packed_by_plan(opened, stored, terminal)
        self._opened, self._longest = opened, longest
        self._terminal, self._output, self._display = terminal, output, display
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
        report = replace(report, arguments=self._opened.request.words)
        self._display.close()  # the plan is the output
        return print_plan(report, self._opened.request.command, self._terminal, self._output.json)

    def _load(self) -> TextGenerator:
        """Load the model for sequences of the longest one's length. Raises TriforceError."""
        opened, longest = self._opened, self._longest
        model, settings = opened.model, opened.settings
        is_exact = not lossy_modes(settings)
        self._display.loading(f"loading {settings.engine.model}")
        stored = stored_tokens(settings.speculation, longest)
        prompt_cache = open_prompt_cache(model, settings, opened.request.home)
        started = time.perf_counter()
        room = model.kv_room(stored, settings.memory_limit(model.device.type), int(opened.request.verify))
        engine = model.load(tiers=self._tiers, prompts=prompt_cache, capacity=longest if is_exact else 0)
        engine.reserve(longest)
        engine.limit_batches(room)
        return TextGenerator(opened, engine, prompt_cache, opened.open_s + time.perf_counter() - started)


def run_generation(
    text: PromptText, request: Request, terminal: Terminal, output: OutputOptions, renderer: Renderer
) -> int:
    """Generate from one prompt, writing as it comes; return the exit code. Raises as `Job.run`."""
    request = request.about([text.document], text.parts)
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
