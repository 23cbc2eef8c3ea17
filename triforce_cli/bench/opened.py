"""A benchmark whose model is opened: all checks that need no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload.api.opened_model import OpenModel
from offload.errors import PromptError
from offload.memory.tier_settings import TierSettings
from offload.settings.config import Sampling, Speculation
from offload.settings.method_sizes import has_draft_model
from offload.units import counted

from ..distributed.rank import broadcast
from ..options.request import Request
from ..output.terminal import Terminal
from ..run.opened_request import open_shared_model, stretch
from ..run.plan import fewest_on_device, plan_tiers
from .methods import BASE, speculations


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request and what to compare: all methods at each context and temperature.

    Args:
        methods: as `parse_methods` returns them; None is all that can run.
        contexts: first tokens of the text to use; empty for all of them.
        temperatures: empty for the model's own.
    """

    request: Request
    text: str
    methods: tuple[str, ...] | None
    contexts: tuple[int, ...]
    temperatures: tuple[float, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class OpenBench:
    """A benchmark that has been checked against its model; the weights are not loaded.

    Args:
        ids: the tokens of the longest prompt.
        contexts: the lengths of the prompts, ascending.
        samplings: by temperature.
        tiers: one placement for all methods; None where everything is on the device.
    """

    asked: BenchRequest
    model: OpenModel
    ids: list[int]
    contexts: tuple[int, ...]
    methods: Mapping[str, Speculation]
    samplings: Mapping[float, Sampling]
    tiers: TierSettings | None

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt and its output."""
        return len(self.ids) + self.asked.request.settings.generation.max_new_tokens

    def memory_of(self, method: Speculation, context: int) -> int:
        """Return the bytes of a method beside the model's weights: KV caches, and a draft model where it uses one."""
        draft = self.model.draft if has_draft_model(method) else None
        length = context + self.asked.request.settings.generation.max_new_tokens
        parts = replace(self.model, speculation=method, draft=draft).estimate(length).parts
        return sum(parts.get(name, 0) for name in ("KV cache", "retrieval cache", "draft model"))


def open_bench(asked: BenchRequest, terminal: Terminal, quiet: bool) -> OpenBench:
    """Open the model and check everything before the weights are loaded. Raises TriforceError."""
    request, settings = asked.request, asked.request.settings
    methods = speculations(asked.methods, settings.speculation)
    widest = next((method for method in methods.values() if has_draft_model(method)), methods[BASE])
    compared = {"methods": list(methods), "contexts": asked.contexts, "temperatures": asked.temperatures}
    model = open_shared_model(request, widest, compared | {"repeats": asked.repeats}, terminal, quiet)
    ids, contexts = prompt_tokens(model, asked.text, asked.contexts, request)
    new_tokens = settings.generation.max_new_tokens
    if request.extend_context:
        model = stretch(model, len(ids) + new_tokens, terminal)
    model.new_tokens(len(ids), new_tokens, exact=True)
    bench = OpenBench(asked, model, ids, contexts, methods, _samplings(asked, model, terminal), None)
    return bench if request.dry_run else replace(bench, tiers=_plan_tiers(bench, terminal))


def prompt_tokens(
    model: OpenModel, text: str, contexts: tuple[int, ...], request: Request
) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens of the longest prompt and the lengths of all, ascending. Raises PromptError."""
    ids = broadcast(request.group, lambda: model.tokenizer.encode(text, special_tokens=True))
    lengths = tuple(sorted(contexts or (len(ids),)))
    if lengths[-1] > len(ids):
        raise PromptError(
            f"the prompt has {counted(len(ids), 'token')}, fewer than --context {lengths[-1]:,}",
            f"give a longer text, or use --context {len(ids)}",
        )
    return ids[: lengths[-1]], lengths


def _samplings(asked: BenchRequest, model: OpenModel, terminal: Terminal) -> dict[float, Sampling]:
    """Return the sampling of each temperature.

    At temperature 0 the model's own penalties and limits do not apply: where temperatures are compared, they apply at
    none of them, so that the rows differ in nothing else.
    """
    settings, own = asked.request.settings, model.sampling
    if len(asked.temperatures) > 1:
        if replace(own, temperature=Sampling().temperature) != Sampling():
            terminal.note("several temperatures: the program's defaults hold in place of the model's own sampling")
        own = Sampling()
    if not asked.temperatures:
        sampling = settings.sampling(own)
        return {sampling.temperature: sampling}
    values = dict(settings.values)
    return {t: replace(settings, values=values | {"temperature": t}).sampling(own) for t in asked.temperatures}


def _plan_tiers(bench: OpenBench, terminal: Terminal) -> TierSettings | None:
    """Return one placement for all methods: that of the method with the fewest layers on the device."""
    model, settings = bench.model, bench.asked.request.settings
    found = [
        plan_tiers(replace(model, speculation=each), replace(settings, speculation=each), bench.longest, terminal)
        for each in bench.methods.values()
    ]
    return fewest_on_device([tiers for tiers in found if tiers is not None])
