"""A plan as text: hardware, a bar for each memory and predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.architecture.head_shape import PUBLISHED, HeadDimensions
from offload.hardware.calibration import Measured
from offload.hardware.profiles import Profile
from offload.planning.batch import Batches
from offload.planning.latency import Decoding
from offload.planning.placement import Tier, resident_tokens
from offload.planning.plan import Plan
from offload.planning.request import PlanRequest
from offload.planning.suggestions import Suggestion
from offload.settings.method_sizes import whole_format
from offload.settings.placement_settings import PLANES
from offload.units import GIB, counted

from .cursor import visible
from .format import duration, milliseconds
from .plan_fields import Argument, batch_lines

BUSY = "measured while the machine was busy"
WIDTH = 60  # cells of a bar
DRAWN, _PLAIN = "█▓▒░▚▞▤▥", "#=+*o%~@"
_EMPTY = "."


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan and what is printed beside it.

    Args:
        suggestions: changes that would fit, if the plan does not.
        measured: where the plan's rates come from, if not from a data sheet.
        profile: printed beside the plan in JSON.
        source: where a well-known model's weights come from, with its licence.
        arguments: what the command line has beside the plan's own flags.
        batches: plans for several sequences together, if they were asked for.
        sibling: a well-known model that could draft for the plan's, which has no draft model.
    """

    plan: Plan
    suggestions: Sequence[Suggestion] = ()
    measured: Measured | None = None
    profile: Profile | None = None
    source: str = ""
    arguments: Sequence[Argument] = ()
    batches: Batches | None = None
    sibling: str | None = None


def plan_text(report: PlanReport, drawn: bool, width: int = WIDTH) -> str:
    """Return the whole plan, the verdict first; every line ends with a newline.

    `drawn`: with block characters, for a terminal; bars have `width` cells.
    """
    plan, request, measured = report.plan, report.plan.request, report.measured
    lines = [verdict(plan, report.suggestions), *_hardware_lines(request)]
    if measured is not None:
        lines.append(f"measured   on {measured.date}: the rates above, of {measured.machine}")
    lines.append(model_line(plan))
    if report.source:
        lines.append(f"weights    {report.source}")
    if report.sibling is not None:
        has = f"{report.sibling} has the vocabulary of a draft model for it (--draft {report.sibling})"
        lines.append(f"draft      {has}")
    if request.is_quantized:
        lines += quantization_lines(plan)
    if not (format := request.kv_format).is_plain:
        effect = "without loss" if format.is_exact else "which changes the answer"
        bits = f"{format.number_bits(request.shape.head_dim):.3g} bits each"
        lines.append(f"KV cache   {format.name} (--kv): {bits}, {effect}")
    lines += ["", *_memory_lines(plan, drawn, width)]
    if measured is not None and measured.busy:
        lines.append(f"times      predicted from rates {BUSY}: less where it is idle")
    lines += _predictions(plan)
    if report.batches is not None:
        lines += batch_lines(report.batches)
    return "".join(f"{line}\n" for line in lines)


def verdict(plan: Plan, suggestions: Sequence[Suggestion] = ()) -> str:
    """Return whether a plan fits, in how much of each memory, with which weights, and else what would."""
    tiers = ((plan.device_name, plan.device), ("host memory", plan.host), ("disk", plan.disk))
    used = [f"{_of_limit(tier)} of {name}" for name, tier in tiers if tier.total and (plan.fits or tier.missing)]
    text = f"{'fits' if plan.fits else 'does not fit'}: {', '.join([*used, _numbers(plan.request)])}"
    ways = ", or ".join(suggestion.change for suggestion in suggestions)
    return f"{text}; would fit with {ways}" if ways else text


def _of_limit(tier: Tier) -> str:
    total, limit = (None if size is None else f"{size / GIB:.1f}" for size in (tier.total, tier.limit))
    return f"{total} GiB" if limit is None else f"{total} of {limit} GiB"


def _numbers(request: PlanRequest) -> str:
    """Return the format of weights, and of keys and values if it is another."""
    usual = "fp32" if request.itemsize == 4 else request.hardware.dtype
    weights = f"weights rounded to {request.quantize}" if request.quantize else "quantised weights"
    kv = "" if request.kv_format.is_plain else f", {request.kv} keys and values"
    return f"{weights if request.is_quantized else usual}{kv}"


def _hardware_lines(request: PlanRequest) -> Iterator[str]:
    """Yield a line for the GPUs, if any, the host, and a disk for KV: memory, and the rates that are assumed."""
    hardware = request.hardware
    assumed = {name: " (assumed)" if name in hardware.assumed else "" for name in ("host bandwidth", "host rate")}
    if hardware.device == "cuda":
        count = "" if hardware.gpus == 1 else f"{hardware.gpus} x "
        rates = f"{hardware.bandwidth / 1e9:,.0f} GB/s, {hardware.flops / 1e12:,.0f} TFLOP/s {hardware.dtype}"
        yield f"GPU        {count}{_gib(hardware.memory)}, {rates}, link {hardware.link / 1e9:g} GB/s"
    memory = "memory not known" if hardware.host_memory is None else f"{_gib(hardware.host_memory)} free"
    if hardware.host_memory is None and request.placement.host_memory is not None:
        memory = f"{_gib(request.placement.host_memory)} (--host-memory)"
    rates = f"{hardware.host_bandwidth / 1e9:.0f} GB/s{assumed['host bandwidth']}"
    yield f"host       {memory}, {rates}, {hardware.host_flops / 1e9:,.0f} GFLOP/s{assumed['host rate']}"
    if request.placement.disk is not None:
        free = "" if hardware.disk_free is None else f", {_gib(hardware.disk_free)} free"
        guess = " (assumed)" if hardware.disk is None else ""
        yield f"disk       {visible(request.placement.disk)}{free}, {hardware.disk_rate / 1e9:.1f} GB/s{guess}"


def model_line(plan: Plan) -> str:
    """Return the model, its size, and the tokens that are planned."""
    request = plan.request
    count = request.shape.parameters
    scales = ((1e9, ".1f", " billion"), (1e6, ".0f", " million"), (1, ",.0f", ""))
    size = next(f"{count / scale:{digits}}{name}" for scale, digits, name in scales if count >= scale)
    read = f" ({request.shape.read_parameters / count:.0%} read by a token)" if request.shape.experts else ""
    tokens = f"{counted(request.tokens, 'token')} of prompt and answer"
    return f"model      {request.model}, {size} parameters{read}; {tokens}"


def quantization_lines(plan: Plan) -> Iterator[str]:
    """Yield how many bits the weights take, and on a GPU how many tokens fit there because of that."""
    request, bits = plan.request, plan.request.bits
    what = "quantised" if request.quantize is None else f"rounded to {request.quantize} (--quantize)"
    experts = "" if bits.experts is None else f", {bits.experts:.3g} in experts"
    yield f"weights    {what}: {bits.layers:.3g} bits each{experts}, {bits.outer:.3g} in embedding and output head"
    if request.hardware.device == "cuda" and (tokens := plan.resident_tokens) is not None:
        unrounded = resident_tokens(replace(request, weight_bits=None))
        found, before = _fitting(tokens, request), _fitting(unrounded or 0, request)
        what = f"{found} of its context" if found.startswith("all") else counted(tokens, "token")
        fits = f"{what} fit with everything on the GPU; with 16 bits a weight {before}"
        yield f"           {fits if tokens else 'the GPU has no room for all layers'}"


def _fitting(tokens: int, request: PlanRequest) -> str:
    """Return how many tokens fit: no more than the model's context has, unless more are planned."""
    context = request.shape.context
    return f"all {context:,}" if request.tokens <= context <= tokens else f"{tokens:,}" if tokens else "none"


def _memory_lines(plan: Plan, drawn: bool, width: int) -> Iterator[str]:
    """Yield a bar for each memory, to the scale of what may be used of it."""
    marks = DRAWN if drawn else _PLAIN
    for name, tier in ((plan.device_name, plan.device), ("host memory", plan.host), ("disk", plan.disk)):
        if tier.total:
            limit = "" if tier.limit is None else f" of {_gib(tier.limit)}"
            yield f"{name}: {_gib(tier.total)}{limit}" + (", which does not fit" if tier.missing else "")
            yield f"[{bar(list(tier.parts.values()), max(tier.limit or 0, tier.total), marks, width)}]"
            parts = zip(marks, tier.parts.items(), strict=False)
            yield "  ".join(f"{mark} {part} {size / GIB:.2f}" for mark, (part, size) in parts)
            yield ""


def bar(sizes: Sequence[int], whole: int, marks: str, width: int = WIDTH) -> str:
    """Return `width` cells for `whole`: each part's share, rounded so that their sum is right too."""
    ends, total = [], 0
    for size in sizes:
        total += size
        ends.append(round(width * total / whole))
    starts = [0, *ends]
    cells = "".join(mark * (end - start) for mark, start, end in zip(marks, starts, ends, strict=False))
    return cells.ljust(width, _EMPTY)


def _predictions(plan: Plan) -> Iterator[str]:
    order = ", layer by layer" if plan.placed.prefill_order == "layers" else ""
    yield _row("prefill", f"{duration(plan.ttft.seconds)} to the first token{order}", plan.ttft.bound)
    yield _decoding_row("plain", plan.plain)
    if plan.chosen.method != "ar":
        yield _decoding_row(plan.chosen.method, plan.chosen, f", {plan.speedup:.1f}x")
        yield f"           {_gammas(plan)}"
    yield f"placement  {_placement(plan)}"
    yield from _expert_lines(plan)


def _row(name: str, text: str, bound: str) -> str:
    return f"{name:<10} {text}; bound by {bound}"


def _decoding_row(name: str, decoding: Decoding, more: str = "") -> str:
    tbt = decoding.tbt
    return _row(name, f"{milliseconds(tbt.seconds)} ms a token, {1 / tbt.seconds:,.1f} tokens/s{more}", tbt.bound)


def _gammas(plan: Plan) -> str:
    chosen = plan.chosen
    low, high = chosen.gammas
    around = f" ({low} to {high} are about as good)" if low != high else ""
    whole = whole_format(plan.request.speculation)
    reads = f"all tokens read as {whole}" if whole else f"{counted(plan.budget, 'token')} in the retrieval cache"
    cache = f"; {reads}" if plan.budget else ""
    expected = f"{chosen.tokens_per_verification:.1f} tokens a verification expected"
    head = plan.request.draft
    if isinstance(head, HeadDimensions) and plan.request.draft_acceptance is None and chosen.method != "lookup":
        expected += f", from public figures of {head.kind} heads" if head.kind in PUBLISHED else ", a guess"
    drafted = f"a tree of {chosen.gamma2}, {chosen.depth} deep," if chosen.depth else f"{chosen.gamma2}"
    return f"{drafted} drafted{around}, {expected}{cache}"


def _placement(plan: Plan) -> str:
    where, layers, shape = plan.placed, plan.request.shape.layers, plan.request.shape
    kind = " without a window" if shape.sliding_layers else " of full attention" if shape.linear else ""
    grown = f"{shape.kv_layers} layers{kind}"
    is_whole = where.weight_layers == layers and not where.away_layers
    if plan.offload == "none":
        text = f"none: {'everything' if is_whole else 'the KV cache'} on the device"
    elif where.uses_disk:
        folder = visible(plan.request.placement.disk)
        text = f"disk: KV of {where.resident_layers} of {grown} in memory, of the others in {folder}"
    else:
        text = f"{plan.offload}: KV of {where.resident_layers} of {grown} resident"
        if plan.offload == "hybrid":
            text += f", the host attends to {100 * plan.host_share:.0f} % of the rest"
        elif plan.offload == PLANES:
            text += ", 8 of 12 bits of the others', from which is drafted; the rest of the bits is streamed"
    if where.weight_layers < layers:
        text += f"; weights of {where.weight_layers} of {layers} layers on the device"
    return text


_WAYS = {
    "host": "run there",
    "stream": "the chosen ones are copied to the device",
    "hybrid": "run there by passes below {:,} rows, else copied to the device",
}


def _expert_lines(plan: Plan) -> Iterator[str]:
    """Yield where the experts are, and what a pass of a token and a verification read of those in host memory."""
    where, experts = plan.placed, plan.request.shape.experts
    if not where.away_layers:
        return
    way = _WAYS[where.experts].format(where.streamed_rows)
    what = f"those of {where.away_layers} of {experts.layers} layers in host memory: {way}"
    yield f"experts    {what} (--experts {where.experts})"
    for each in plan.expert_times:
        who = "a token reads" if each.tokens == 1 else f"{each.tokens} together read"
        times = {"on the host": each.host_s, "over the link": each.link_s, "on the device": each.device_s}
        listed = ", ".join(f"{milliseconds(seconds)} ms {name}" for name, seconds in times.items())
        yield f"           {who} {each.distinct:.0f} of {experts.count} in each, {each.bytes / GIB:.2f} GiB: {listed}"


def _gib(size: int | None) -> str:
    return "memory not known" if size is None else f"{size / GIB:.2f} GiB"
