"""A plan as text: the verdict, facts, a table of the memories and predictions; and several plans as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from offload.settings.kv_formats import PLAIN_KV
from offload.units import GIB, counted, size_text

from .cursor import visible
from .format import duration, milliseconds
from .tables import Column, hanging, lines_text, table

if TYPE_CHECKING:
    from offload.hardware.calibration import Measured
    from offload.hardware.profiles import Profile
    from offload.planning.batch import Batches, BatchPlan
    from offload.planning.latency import Decoding
    from offload.planning.placement import Tier
    from offload.planning.plan import Plan
    from offload.planning.request import PlanRequest
    from offload.planning.suggestions import Suggestion

_INDENT = 11  # cells of the names of facts


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan and what is printed beside it.

    Args:
        suggestions: changes that would fit, if the plan does not.
        measured: where the plan's rates come from, if not from a data sheet.
        profile: printed beside the plan in JSON.
        source: where a well-known model's weights come from, with its licence.
        arguments: the words of the command line, to which the plan's options are added.
        batches: plans for several sequences together, if they were asked for.
        sibling: a well-known model that could draft for the plan's, which has no draft model.
    """

    plan: Plan
    suggestions: Sequence[Suggestion] = ()
    measured: Measured | None = None
    profile: Profile | None = None
    source: str = ""
    arguments: Sequence[str] = ()
    batches: Batches | None = None
    sibling: str | None = None


def plan_text(report: PlanReport, width: int | None = None) -> Text:
    """Return the whole plan, the verdict first; facts are wrapped to `width` cells, None for as many as they need."""
    plan = report.plan
    text = lines_text([verdict(plan, report.suggestions)], width)
    text.append_text(facts_text(list(_about(report)), width)).append("\n")
    text.append_text(_memory_table(plan, width)).append("\n")
    predicted = [*_predictions(plan), *(() if report.batches is None else _batches(report.batches))]
    return text.append_text(facts_text(predicted, width))


def comparison_text(plans: Sequence[Plan], width: int | None = None) -> Text:
    """Return a table with a row for each plan that fits, the fastest first, below the model and the context.

    Plans that do not fit are listed below it.
    """
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.chosen.tbt.seconds)
    note = "in GiB, on each device and on the host; ar is plain decoding"
    text = facts_text([("model", _model(plans[0].request)), ("memory", note)], width).append("\n")
    names = ("device", "host", "TTFT", "ar ms", "method", "ms", "speedup")
    columns = [Column("profile", style="cyan"), *(Column(name, right=name != "method") for name in names)]
    rows = [
        (
            plan.request.hardware.name,
            f"{plan.device.total / GIB:.1f}",
            f"{plan.host.total / GIB:.1f}",
            duration(plan.ttft.seconds),
            milliseconds(plan.plain.tbt.seconds),
            plan.chosen.method,
            milliseconds(plan.chosen.tbt.seconds),
            f"{plan.speedup:.2f}x",
        )
        for plan in fitting
    ]
    text.append_text(table(columns, rows, width))
    if missing := [plan.request.hardware.name for plan in plans if not plan.fits]:
        small = f"{counted(len(missing), 'profile')} too small: {', '.join(missing)}"
        text.append("\n").append_text(lines_text([small], width))
    return text


def facts_text(facts: Sequence[tuple[str, str]], width: int | None) -> Text:
    """Return a line for each name with its text; without a name it continues the one above."""
    lines = [f"{name:<{_INDENT - 1}} {visible(text)}" for name, text in facts]
    shown = lines if width is None else [part for line in lines for part in hanging(line, _INDENT, width)]
    return Text("".join(f"{line}\n" for line in shown))


def verdict(plan: Plan, suggestions: Sequence[Suggestion] = ()) -> str:
    """Return whether a plan fits, in how much of each memory, with which weights, and else what would."""
    request = plan.request
    used = [
        f"{tier.total / GIB:.1f}{'' if tier.limit is None else f' of {tier.limit / GIB:.1f}'} GiB of {name}"
        for name, tier in _tiers(plan)
        if plan.fits or tier.missing
    ]
    weights = f"weights rounded to {request.quantize}" if request.quantize else "quantised weights"
    weights = weights if request.is_quantized else "fp32" if request.itemsize == 4 else request.hardware.dtype
    kv = "" if request.kv_format is PLAIN_KV else f", {request.kv} keys and values"
    text = f"{'fits' if plan.fits else 'does not fit'}: {', '.join([*used, weights + kv])}"
    ways = ", or ".join(suggestion.change for suggestion in suggestions)
    return f"{text}; would fit with {ways}" if ways else text


def _tiers(plan: Plan) -> list[tuple[str, Tier]]:
    """Return the memories that the plan uses, by name."""
    tiers = ((plan.device_name, plan.device), ("host memory", plan.host), ("disk", plan.disk))
    return [(name, tier) for name, tier in tiers if tier.total]


def _about(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield the facts that the plan starts from: hardware, model, weights, keys and values."""
    request, measured = report.plan.request, report.measured
    yield from _hardware(request)
    if measured is not None:
        yield "measured", f"on {measured.date}: the rates above, of {measured.machine}"
    yield "model", _model(request)
    if report.source:
        yield "weights", report.source
    if report.sibling is not None:
        yield "draft", f"{report.sibling} has the vocabulary of a draft model for it (--draft {report.sibling})"
    if request.is_quantized:
        what = "quantised" if request.quantize is None else f"rounded to {request.quantize} (--quantize)"
        experts = "" if request.bits.experts is None else f", {request.bits.experts:.3g} in experts"
        bits = f"{request.bits.layers:.3g} bits each{experts}, {request.bits.outer:.3g} in embedding and output head"
        yield "weights", f"{what}: {bits}"
    if (format := request.kv_format) is not PLAIN_KV:
        effect = "which changes the answer" if format.lossy else "without loss"
        bits = f"{format.number_bits(request.shape.head_dim):.3g} bits each"
        yield "KV cache", f"{format.name} (--kv): {bits}, {effect}"


def _hardware(request: PlanRequest) -> Iterator[tuple[str, str]]:
    """Yield the GPUs, if any, the host, and a disk for KV: memory, and the rates that are assumed."""
    hardware, placement = request.hardware, request.placement
    if hardware.device == "cuda":
        count = "" if hardware.gpus == 1 else f"{hardware.gpus} x "
        rates = f"{hardware.bandwidth / 1e9:,.0f} GB/s, {hardware.flops / 1e12:,.0f} TFLOP/s {hardware.dtype}"
        yield "GPU", f"{count}{_known(hardware.memory)}, {rates}, link {hardware.link / 1e9:g} GB/s"
    rates = f"{hardware.host_bandwidth / 1e9:.0f} GB/s, {hardware.host_flops / 1e9:,.0f} GFLOP/s"
    assumed = f" ({' and '.join(hardware.assumed)} assumed)" if hardware.assumed else ""
    yield "host", f"{_known(hardware.host_memory or placement.host_memory)}, {rates}{assumed}"
    if placement.disk is not None:
        rate = f"{hardware.disk_rate / 1e9:.1f} GB/s{' (assumed)' if hardware.disk is None else ''}"
        yield "disk", f"{placement.disk}, {_known(hardware.disk_free)} free, {rate}"


def _model(request: PlanRequest) -> str:
    """Return the model, its size, and the tokens that are planned."""
    count = request.shape.parameters
    scales = ((1e9, ".1f", " billion"), (1e6, ".0f", " million"), (1, ",.0f", ""))
    size = next(f"{count / scale:{digits}}{name}" for scale, digits, name in scales if count >= scale)
    read = f" ({request.shape.read_parameters / count:.0%} read by a token)" if request.shape.experts else ""
    return f"{request.model}, {size} parameters{read}; {counted(request.tokens, 'token')} of prompt and answer"


def _memory_table(plan: Plan, width: int | None) -> Text:
    """Return a row for each part of what is in memory, in GiB, with a column for each memory."""
    tiers = _tiers(plan)
    parts = dict.fromkeys(part for _, tier in tiers for part in tier.parts)
    rows = [[part, *(_number(tier.parts.get(part)) for _, tier in tiers)] for part in parts]
    rows.append(["all", *(_number(tier.total) for _, tier in tiers)])
    rows.append(["may be used", *("not known" if tier.limit is None else _number(tier.limit) for _, tier in tiers)])
    return table([Column("GiB"), *(Column(name, right=True) for name, _ in tiers)], rows, width)


def _number(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _predictions(plan: Plan) -> Iterator[tuple[str, str]]:
    where, chosen, experts = plan.placed, plan.chosen, plan.request.shape.experts
    order = ", layer by layer" if where.prefill_order == "layers" else ""
    yield "prefill", f"{duration(plan.ttft.seconds)} to the first token{order}; bound by {plan.ttft.bound}"
    yield "plain", _speed(plan.plain)
    if chosen.method != "ar":
        yield chosen.method, _speed(chosen, f", {plan.speedup:.1f}x")
        drafted = f"a tree of {chosen.gamma2}, {chosen.depth} deep," if chosen.depth else f"{chosen.gamma2}"
        cache = f"; {counted(plan.budget, 'token')} in the retrieval cache" if plan.budget else ""
        yield "", f"{drafted} drafted, {chosen.tokens_per_verification:.1f} tokens a verification expected{cache}"
    yield "placement", _placement(plan)
    if where.away_layers:
        yield "experts", f"those of {where.away_layers} of {experts.layers} layers in host memory"


def _speed(decoding: Decoding, more: str = "") -> str:
    tbt = decoding.tbt
    return f"{milliseconds(tbt.seconds)} ms a token, {1 / tbt.seconds:,.1f} tokens/s{more}; bound by {tbt.bound}"


def _placement(plan: Plan) -> str:
    """Return where keys, values and weights are."""
    where, layers, shape = plan.placed, plan.request.shape.layers, plan.request.shape
    of = f"of {where.resident_layers} of {shape.kv_layers} layers"
    if plan.offload == "none":
        is_whole = where.weight_layers == layers and not where.away_layers
        text = f"none: {'everything' if is_whole else 'the KV cache'} on the device"
    elif where.uses_disk:
        text = f"disk: KV {of} in memory, of the others in {plan.request.placement.disk}"
    else:
        text = f"{plan.offload}: KV {of} resident"
        text += f", the host attends to {100 * plan.host_share:.0f} % of the rest" if plan.offload == "hybrid" else ""
    return text + (f"; weights of {where.weight_layers} of {layers} layers" if where.weight_layers < layers else "")


def _batches(batches: Batches) -> Iterator[tuple[str, str]]:
    """Yield how many sequences fit together, and for each size throughput, and what the batch brings."""
    from offload.planning.batch import MOST_SEQUENCES

    shared = f", with a common beginning of {counted(batches.shared, 'token')}" if batches.shared else ""
    fitting = "how many sequences fit is not known, as the memory is not"
    if batches.fitting is not None:
        more = " or more" if batches.fitting == MOST_SEQUENCES else ""
        fitting = f"{counted(batches.fitting, 'sequence')}{more} fit{'s' * (batches.fitting == 1)} together"
    yield "batches", fitting + shared
    for each in batches.plans:
        yield f"batch {each.sequences}", _throughput(each) if each.fits else each.together.shortage()


def _throughput(batch: BatchPlan) -> str:
    """Return tokens a second of all sequences, plainly and by the method, and relative to one after the other."""
    plain = f"plain {batch.plain_tokens_per_s:,.1f} tokens/s, {batch.plain_gain:.2f}x one after the other"
    method = batch.together.chosen.method
    if method == "ar":
        return plain if batch.alone.chosen.method == "ar" else f"{plain}; speculation does not pay"
    return f"{plain}; {method} {batch.tokens_per_s:,.1f}, {batch.gain:.2f}x; {batch.speedup:.2f}x plain"


def _known(size: int | None) -> str:
    return "memory not known" if size is None else size_text(size)
