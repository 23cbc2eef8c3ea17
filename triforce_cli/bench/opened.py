"""A benchmark with its model opened: all checks that need no weights, and the cells in the order in which they run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from offload.api.opened_model import OpenModel
from offload.errors import SettingsError
from offload.memory.tier_settings import TierSettings
from offload.settings.config import Sampling, Speculation
from offload.settings.method_sizes import has_draft_model
from offload.units import size_text

from ..distributed.rank import broadcast
from ..options.mode_checks import warn_of_chunks
from ..options.settings import Settings
from ..output.terminal import Terminal
from ..run.job import check_sequences
from ..run.model_request import open_shared_model, stretch
from ..run.processor import processor
from .axes import AXES, BATCH, CONTEXT, points
from .benchmark import Benchmark, BenchRequest, note_grouped, plan_bench_tiers
from .cells import Cell, Weights, digest, weights_of
from .compared import BASE, TREES, speculations
from .ladder import in_order
from .peer import Peer
from .peers import Local
from .prompts import BenchPrompt, open_prompts
from .report import LADDER

_FORGOTTEN = (
    "method",
    "stop",
    "profile",
    "cache",
    "cache_limit",
    "join_timeout",
    "disk",
    "disk_limit",
    "model",
)


@dataclass(frozen=True, slots=True)
class Point:
    """The settings of one combination of values."""

    values: Mapping[str, Any]
    settings: Settings
    sampling: Sampling
    speculations: Mapping[str, Speculation]


@dataclass(frozen=True, slots=True)
class OpenBench:
    """A benchmark that has been checked against its model; the weights are not loaded.

    Args:
        widest: the longest prompt with the most new tokens, and the methods of all points.
        cells: each with its point, grouped by prompt and context, plain decoding first.
        base: of each cell, that which it is compared with: plain decoding's, or its method's batch 1.
        digests: of each prompt's first tokens, by its number, the context and the batch.
        weights: what identifies the model's weights, where runs are kept; and the draft model's.
    """

    asked: BenchRequest
    model: OpenModel
    prompts: Sequence[BenchPrompt]
    widest: Benchmark
    cells: Mapping[Cell, Point]
    base: Mapping[Cell, Cell]
    digests: Mapping[tuple[int, int | None, int], str]
    weights: Weights

    def ids(self, cell: Cell) -> list[int]:
        """Return a cell's prompt."""
        return self.prompts[cell.prompt].first(cell.context)

    def sequences(self, cell: Cell) -> list[list[int]]:
        """Return the prompts that a cell decodes together."""
        return self.prompts[cell.prompt].sequences(cell.batch, cell.context)

    def peer(self, cell: Cell) -> Peer | None:
        """Return the program that a cell measures, if it is not this one."""
        return next((peer for peer in self.asked.peers if peer.name == cell.method), None)

    def benchmark(self, cell: Cell) -> Benchmark:
        point = self.cells[cell]
        return replace(
            self.widest,
            settings=point.settings,
            ids=self.ids(cell),
            sampling=point.sampling,
            speculations=dict(point.speculations),
        )

    def facts(self, cell: Cell, repeat: int) -> dict[str, Any]:
        """Return what identifies a run of a cell: see `records.identity`."""
        point = self.cells[cell]
        speculation = point.speculations[cell.method]
        model = replace(self.model, speculation=speculation)
        described = settings_of_run(model, point.settings, point.sampling, self.weights, self.widest.tiers)
        peer = self.peer(cell)
        described |= {"peer": peer.facts} if peer is not None else {}
        return {
            "prompt": self.prompts[cell.prompt].name,
            "prompt_sha256": self.digests[cell.prompt, cell.context, cell.batch],
            "prompt_tokens": len(self.ids(cell)),
            "method": cell.method,
            "repeat": repeat,
            "settings": described | ({BATCH: cell.batch} if cell.batch > 1 else {}),
            "machine": {"name": processor(self.model.device)},
        }


def settings_of_run(
    model: OpenModel, settings: Settings, sampling: Sampling, weights: Weights, tiers: TierSettings | None
) -> dict[str, Any]:
    """Return the settings that the result of a run depends on, with what identifies the weights."""
    speculation = model.speculation
    described = settings.described(sampling) | asdict(speculation)
    unread = [axis.name for axis in AXES.values() if not axis.is_read_by(speculation)]
    kept = {name: value for name, value in described.items() if name not in (*_FORGOTTEN, *unread)}
    device = {"device": model.device.type, "kernel": model.kernel, "dtype": str(model.dtype)}
    # The placement that was planned: the free memory decides it where it is not given.
    placement = None if tiers is None else asdict(tiers) | {"disk": tiers.disk is not None}
    placed = {"context": model.checkpoint.shape.context, "tiers": placement}
    return {"model": settings.engine.model, **kept, **device, **weights.read_by(speculation), **placed}


def open_bench(asked: BenchRequest, terminal: Terminal, quiet: bool) -> OpenBench:
    """Open the model and check all points before the weights are loaded. Raises TriforceError."""
    request, settings = asked.request, asked.request.settings
    by_point = [(values, _with(settings, values)) for values in points(asked.axes)]
    methods = [(values, each, speculations(asked.methods, each.speculation)) for values, each in by_point]
    _check_peers(asked)
    distinct = dict.fromkeys(one for _, _, row in methods for one in row.values())
    every = {BASE: methods[0][2][BASE]} | {str(number): one for number, one in enumerate(distinct)}
    widest = next((method for method in every.values() if has_draft_model(method)), every[BASE])
    compared = {"methods": list(methods[0][2]), "repeats": asked.repeats, "context": asked.contexts}
    compared |= {"extend_context": request.extend_context, "prompts": asked.excerpts, "lists": dict(asked.axes)}
    model = open_shared_model(request, widest, compared, terminal, quiet)
    packed = broadcast(request.group, lambda: [p.packed() for p in open_prompts(asked, model.tokenizer, terminal.warn)])
    prompts = [BenchPrompt.unpacked(*prompt) for prompt in packed]
    longest = max((prompt.ids for prompt in prompts), key=len)
    new_tokens = max(each.generation.max_new_tokens for _, each in by_point)
    if request.extend_context:
        model = stretch(model, len(longest) + new_tokens, terminal)
    model.new_tokens(len(longest), new_tokens, exact=True)
    settings = _with(settings, {"max_new_tokens": new_tokens})
    own = _own_sampling(asked, model, terminal)
    benchmark = Benchmark(settings, model, longest, settings.sampling(own), every, None)
    if not request.dry_run:
        benchmark = replace(benchmark, tiers=plan_bench_tiers(benchmark, terminal))
    warn_of_chunks(model, settings, distinct, len(longest) + new_tokens, benchmark.tiers is not None, terminal)
    alike = {peer.name: every[BASE] for peer in asked.peers}  # they decode as ar does
    opened = [Point(values, each, each.sampling(own), row | alike) for values, each, row in methods]
    for peer in () if request.dry_run else asked.peers:
        peer.open(model, len(longest) + new_tokens)
        if isinstance(peer, Local) and not quiet:
            need = model.estimate(len(longest) + new_tokens)
            terminal.note(f"{peer.name} loads the model again: {size_text(need.weights + need.kv)} more memory")
    cells, base = _cells(asked, len(prompts), opened)
    places = dict.fromkeys((cell.prompt, cell.context, cell.batch) for cell in cells)
    digests = {place: _digest(prompts[place[0]], *place[1:]) for place in places}
    weights = Weights()
    if asked.points is not None:
        weights = Weights(**broadcast(request.group, lambda: asdict(weights_of(model, request.home))))
    opened_bench = OpenBench(asked, model, prompts, benchmark, cells, base, digests, weights)
    _check_batches(opened_bench)
    for context in asked.contexts or ():
        note_grouped(context, terminal)
    return opened_bench


def _check_peers(asked: BenchRequest) -> None:
    """Raise SettingsError for what other programs do not run as this one does."""
    group = asked.request.group
    if asked.peers and group is not None and group.size > 1:
        raise SettingsError("--peers runs beside one process", "leave --tensor-parallel out")
    if asked.peers and asked.request.extend_context:
        raise SettingsError("--peers run the model's own context", "leave --extend-context out")


def _digest(prompt: BenchPrompt, context: int | None, batch: int) -> str:
    sequences = prompt.sequences(batch, context)
    return digest(sequences[0] if batch == 1 else sequences)


def _check_batches(bench: OpenBench) -> None:
    """Raise SettingsError for batches that cannot run, OutOfMemory for those that do not fit."""
    benchmark, model = bench.widest, bench.model
    if max(bench.asked.batches) == 1 or bench.asked.request.dry_run:
        return
    if benchmark.tiers is not None or model.group.size > 1:
        raise SettingsError("--batch needs all keys and values in this process's memory", "leave --batch out")
    for cell, point in bench.cells.items():
        if cell.batch > 1:
            length = len(bench.ids(cell)) + point.settings.generation.max_new_tokens
            method = replace(model, speculation=point.speculations[cell.method])
            check_sequences(method, point.settings, length, cell.batch, "--batch")


def _own_sampling(asked: BenchRequest, model: OpenModel, terminal: Terminal) -> Sampling:
    """Return the sampling to which the given settings are added: the model's own, unless temperatures are compared.

    At temperature 0 the model's own penalties and limits do not apply: for points that differ in nothing else, they
    apply at no temperature.
    """
    if "temperature" not in asked.axes:
        return model.sampling
    if replace(model.sampling, temperature=Sampling().temperature) != Sampling():
        terminal.note("several temperatures: the program's defaults hold in place of the model's own sampling")
    return Sampling()


def _with(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with other values of some. Raises SettingsError for a combination that cannot be."""
    groups = {}
    for group in ("generation", "speculation"):
        old = getattr(settings, group)
        groups[group] = replace(old, **{name: each for name, each in values.items() if hasattr(old, name)})
    return replace(settings, values=dict(settings.values) | dict(values), **groups)


def _cells(asked: BenchRequest, prompts: int, opened: Sequence[Point]) -> tuple[dict[Cell, Point], dict[Cell, Cell]]:
    """Return all cells and their bases. What a method does not read is run once."""
    cells: dict[Cell, Point] = {}
    base: dict[Cell, Cell] = {}
    contexts = sorted(asked.contexts or (None,), key=lambda tokens: tokens or 0)
    places = list(product(range(prompts), contexts))
    for prompt, context in in_order(places) if asked.kind == LADDER else places:
        for batch, point in product(sorted(asked.batches), opened):
            if not asked.includes({CONTEXT: context, BATCH: batch, **point.values}):
                continue
            of_point = {name: _cell(prompt, context, batch, name, point) for name in point.speculations}
            for cell in of_point.values():
                cells.setdefault(cell, point)
                base.setdefault(cell, of_point[BASE])
    return _in_turn(asked, cells) if asked.in_turn else (cells, base)


def _in_turn(asked: BenchRequest, cells: Mapping[Cell, Point]) -> tuple[dict[Cell, Point], dict[Cell, Cell]]:
    """Return the cells of the methods asked for, by method, and as their base the same method's batch 1."""
    named = asked.methods or ()
    kept = sorted((cell for cell in cells if cell.method in named), key=lambda cell: _order(cell.method, named))
    return {cell: cells[cell] for cell in kept}, {cell: replace(cell, batch=1) for cell in kept}


def _order(method: str, named: Sequence[str]) -> int:
    return -1 if method == BASE else named.index(method)


def _cell(prompt: int, context: int | None, batch: int, method: str, point: Point) -> Cell:
    speculation = point.speculations[method]
    read = {name: value if AXES[name].is_read_by(speculation) else None for name, value in point.values.items()}
    name = method.partition(":")[0]
    own = {"tree"} if ":tree=" in method or name in TREES else set()  # a tree of its own
    own |= {"tree_sampling"} if name in TREES else set()
    read |= dict.fromkeys(own & read.keys())
    return Cell(prompt, context, method, tuple(read.items()), batch)
