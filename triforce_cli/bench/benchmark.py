"""A benchmark with its model opened: all checks that need no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.api.opened_model import OpenModel
from offload.memory.tier_settings import TierSettings
from offload.settings.config import GenerationConfig, Sampling, Speculation
from offload.settings.method_sizes import has_draft_model
from offload.units import counted

from ..options.request import Request
from ..options.settings import Settings
from ..output.terminal import Terminal
from ..run.model_request import open_shared_model, stretch
from ..run.plan import fewest_on_device, plan_tiers
from .grouped_number import Grouped
from .methods import BASE, speculations
from .windows import TextTooShort


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request, and what to compare. `methods` None is all that can run; `context` is the tokens to use, None all."""

    request: Request
    text: str
    methods: tuple[str, ...] | None
    context: int | None
    repeats: int


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that has been checked against its model; the weights are not loaded."""

    settings: Settings
    repeats: int
    model: OpenModel
    ids: list[int]
    sampling: Sampling
    speculations: dict[str, Speculation]
    tiers: TierSettings | None

    @property
    def config(self) -> GenerationConfig:
        return self.settings.generation

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.ids) + self.config.max_new_tokens


def open_benchmark(bench: BenchRequest, terminal: Terminal, quiet: bool) -> Benchmark:
    """Open the model and check the benchmark before the weights are loaded. Raises TriforceError."""
    request, settings = bench.request, bench.request.settings
    methods = speculations(bench.methods, settings.speculation)
    # Opened for the method with the largest needs: a draft model is found and loaded if any of them uses one.
    widest = next((method for method in methods.values() if has_draft_model(method)), methods[BASE])
    compared = {"methods": list(methods), "repeats": bench.repeats, "context": bench.context}
    compared["extend_context"] = request.extend_context
    model = open_shared_model(request, widest, compared, terminal, quiet)
    for method in methods.values():
        model.check_self_draft(method)
    ids = first_tokens(model.tokenizer.encode(bench.text, special_tokens=True), bench.context)
    if request.extend_context:
        model = stretch(model, len(ids) + settings.generation.max_new_tokens, terminal)
    model.new_tokens(len(ids), settings.generation.max_new_tokens, exact=True)
    sampling = settings.sampling(model.sampling)
    note_grouped(bench.context, terminal)
    benchmark = Benchmark(settings, bench.repeats, model, ids, sampling, methods, None)
    return benchmark if request.dry_run else replace(benchmark, tiers=plan_bench_tiers(benchmark, terminal))


def plan_bench_tiers(benchmark: Benchmark, terminal: Terminal) -> TierSettings | None:
    """Return one placement for all methods: that of the method with the fewest layers on the device."""
    model, settings = benchmark.model, benchmark.settings
    found = [
        plan_tiers(
            replace(model, speculation=method), replace(settings, speculation=method), benchmark.length, terminal
        )
        for method in benchmark.speculations.values()
    ]
    return fewest_on_device([tiers for tiers in found if tiers is not None])


def note_grouped(context: int | None, terminal: Terminal) -> None:
    """Print that a context is one number, where it was written as a list could be."""
    if isinstance(context, Grouped):
        terminal.note(f"--context {context:,} is one number; {context.hint}")


def first_tokens(ids: list[int], count: int | None) -> list[int]:
    """Return the first `count` tokens, or all. Raises TextTooShort if there are fewer."""
    if count is not None and count > len(ids):
        meant = f"; {count.hint}" if isinstance(count, Grouped) else ""
        raise TextTooShort(
            len(ids),
            f"the prompt has {counted(len(ids), 'token')}, fewer than --context {count:,}",
            f"give a longer text, or use --context {len(ids)}{meant}",
        )
    return ids[:count]
