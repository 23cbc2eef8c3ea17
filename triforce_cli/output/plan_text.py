"""Prints plans, as text or as JSON: the verdict, facts, memories and predictions of one; several plans as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from offload.architecture.known_models import weight_bytes
from offload.settings.kv_formats import PLAIN_KV
from offload.units import GIB, counted, size_text

from ..signals import DONE, FAILED
from .format import about, duration, milliseconds, size
from .plan_fields import command_line, plan_fields
from .stdout_formats import json_line
from .tables import Column, hanging, lines_text, table
from .terminal import Terminal
from .text_layout import visible

if TYPE_CHECKING:  # every command imports this module, and few of them plan
    from offload.hardware.calibration import Measured
    from offload.hardware.profiles import Profile
    from offload.planning.inputs import PlanInputs
    from offload.planning.latency import Decoding
    from offload.planning.plan import Plan

_INDENT = 11  # cells of the names of facts
_RECOMMENDED = ("size", "first word", "tokens/s")


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan and what is printed beside it.

    Args:
        suggestions: in words, changes that would fit, if the plan does not.
        measured: where the plan's rates come from, if not from a data sheet.
        profile: printed beside the plan in JSON.
        source: where a well-known model's weights come from, with its licence.
        arguments: the words of the command line, to which the plan's options are added.
        sibling: a well-known model that could draft for the plan's, which has no draft model.
    """

    plan: Plan
    suggestions: Sequence[str] = ()
    measured: Measured | None = None
    profile: Profile | None = None
    source: str = ""
    arguments: Sequence[str] = ()
    sibling: str | None = None


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The plans for several profiles, each with suggestions if it does not fit.

    `measured` gave the rates of the profiles named in `measured_names`.
    """

    plans: Sequence[tuple[Plan, Sequence[str]]]
    measured: Measured | None
    measured_names: Sequence[str]


def print_plan(report: PlanReport, command: str, terminal: Terminal, json: bool, verbose: int = 0) -> int:
    """Print the plan, short or with `verbose` whole, and on stderr what is missing; return the exit code.

    The text of a plan that fits ends with the line of `triforce <command>` for it.
    """
    plan = report.plan
    if json:
        profile = {} if report.profile is None else {"profile": asdict(report.profile)}
        measured = report.measured and asdict(report.measured)
        fields = plan_fields(plan, report.suggestions) | {"draft_model": report.sibling}
        terminal.write(json_line(type="plan", **profile, measured=measured, plan=fields))
    else:
        text = plan_text(report, terminal.table_width, verbose > 0)
        if plan.fits:
            text.append(f"\n{command_line(command, plan, report.arguments)}\n", "bold")
        terminal.print(text)
    if plan.fits:
        return DONE
    terminal.error(plan.shortage(), suggestions_text(report.suggestions))
    return FAILED


def print_comparison(comparison: PlanComparison, terminal: Terminal, json: bool) -> int:
    """Print a table of the plans, or one line of JSON; return the exit code."""
    plans, measured = comparison.plans, comparison.measured
    if json:
        fields = [plan_fields(plan, suggestions) for plan, suggestions in plans]
        terminal.write(json_line(type="comparison", measured=measured and asdict(measured), plans=fields))
        return DONE
    text = comparison_text([plan for plan, _ in plans], terminal.table_width)
    if measured is not None:
        names = ", ".join(comparison.measured_names)
        text = Text(f"measured   on {measured.date}: the rates of {names}, of {measured.machine}\n").append_text(text)
    terminal.print(text)
    return DONE


def suggestions_text(suggestions: Sequence[str]) -> str:
    """Return the suggestions in one line, for a hint."""
    return ", or ".join([*suggestions, "a smaller model, or other hardware (`triforce profile --compare`)"])


def plan_text(report: PlanReport, width: int | None = None, verbose: bool = True) -> Text:
    """Return the plan, the verdict first; facts are wrapped to `width` cells, None for as many as they need."""
    plan = report.plan
    text = lines_text([_verdict(plan)], width)
    if not verbose:
        return text.append_text(facts_text(list(_short(report)), width))
    text.append_text(facts_text([*_hardware(plan.inputs), *_about(report)], width)).append("\n")
    text.append_text(_memory_table(plan, width)).append("\n")
    return text.append_text(facts_text(list(_predictions(plan)), width))


def recommendation_text(plans: Sequence[Plan], width: int | None) -> Text:
    """Return a table of models to choose from, the best one first; empty without any."""
    columns = [Column("to fetch", style="cyan"), *(Column(name, right=True) for name in _RECOMMENDED)]
    rows = [
        (
            plan.inputs.model,
            size(weight_bytes(plan.inputs.model)),
            about(plan.ttft.seconds).removeprefix("about "),
            f"{1 / plan.chosen.tbt.seconds:,.1f}",
        )
        for plan in plans
    ]
    return table(columns, rows, width).append("\n") if plans else Text()


def _short(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield what a user decides by: the model, how fast it reads and writes, and what lies where."""
    plan, chosen = report.plan, report.plan.chosen
    yield "model", _model(plan.inputs)
    if report.source:
        yield "from", report.source
    yield "reads", f"{about(plan.ttft.seconds)} to the first word"
    gain = "" if chosen.method == "ar" else f", {plan.speedup:.1f}x plain decoding by {chosen.method}"
    yield "writes", f"{1 / chosen.tbt.seconds:,.1f} tokens/s{gain}"
    yield "placement", _placement(plan)


def comparison_text(plans: Sequence[Plan], width: int | None = None) -> Text:
    """Return a table with a row for each plan that fits, the fastest first, below the model and the context.

    Plans that do not fit are listed below it.
    """
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.chosen.tbt.seconds)
    note = "in GiB, on each device and on the host; ar is plain decoding"
    text = facts_text([("model", _model(plans[0].inputs)), ("memory", note)], width).append("\n")
    names = ("device", "host", "TTFT", "ar ms", "method", "ms", "speedup")
    columns = [Column("profile", style="cyan"), *(Column(name, right=name != "method") for name in names)]
    rows = [
        (
            plan.inputs.hardware.name,
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
    if missing := [plan.inputs.hardware.name for plan in plans if not plan.fits]:
        small = f"{counted(len(missing), 'profile')} too small: {', '.join(missing)}"
        text.append("\n").append_text(lines_text([small], width))
    return text


def facts_text(facts: Sequence[tuple[str, str]], width: int | None) -> Text:
    """Return a line for each name with its text; without a name it continues the one above."""
    lines = [f"{name:<{_INDENT - 1}} {visible(text)}" for name, text in facts]
    shown = lines if width is None else [part for line in lines for part in hanging(line, _INDENT, width)]
    return Text("".join(f"{line}\n" for line in shown))


def _verdict(plan: Plan) -> str:
    """Return whether a plan fits, in how much of each memory, and with which weights."""
    inputs = plan.inputs
    used = [
        f"{tier.total / GIB:.1f}{'' if tier.limit is None else f' of {tier.limit / GIB:.1f}'} GiB of {name}"
        for name, tier in plan.tiers
        if tier.missing or (plan.fits and tier.total)
    ]
    weights = f"weights rounded to {inputs.quantize}" if inputs.quantize else "quantised weights"
    weights = weights if inputs.is_quantized else "fp32" if inputs.itemsize == 4 else inputs.hardware.dtype
    kv = "" if inputs.kv_format is PLAIN_KV else f", {inputs.kv} keys and values"
    return f"{'fits' if plan.fits else 'does not fit'}: {', '.join([*used, weights + kv])}"


def _about(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield the facts that the plan starts from, beside the hardware: model, weights, keys and values."""
    inputs, measured = report.plan.inputs, report.measured
    if measured is not None:
        yield "measured", f"on {measured.date}: the rates above, of {measured.machine}"
    yield "model", _model(inputs)
    if report.source:
        yield "weights", report.source
    if report.sibling is not None:
        yield "draft", f"{report.sibling} has the vocabulary of a draft model for it (--draft {report.sibling})"
    if inputs.is_quantized:
        what = "quantised" if inputs.quantize is None else f"rounded to {inputs.quantize} (--quantize)"
        experts = "" if inputs.bits.experts is None else f", {inputs.bits.experts:.3g} in experts"
        bits = f"{inputs.bits.layers:.3g} bits each{experts}, {inputs.bits.outer:.3g} in embedding and output head"
        yield "weights", f"{what}: {bits}"
    if (format := inputs.kv_format) is not PLAIN_KV:
        effect = "which changes the answer" if format.lossy else "without loss"
        bits = f"{format.number_bits(inputs.shape.head_dim):.3g} bits each"
        yield "KV cache", f"{format.name} (--kv): {bits}, {effect}"


def _hardware(inputs: PlanInputs) -> Iterator[tuple[str, str]]:
    """Yield the GPUs, if any, the host, and a disk for KV: memory, and the rates that are assumed."""
    hardware, placement = inputs.hardware, inputs.placement
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


def _model(inputs: PlanInputs) -> str:
    """Return the model, its size, and the tokens that are planned."""
    count = inputs.shape.parameters
    scales = ((1e9, ".1f", " billion"), (1e6, ".0f", " million"), (1, ",.0f", ""))
    parameters = next(f"{count / scale:{digits}}{name}" for scale, digits, name in scales if count >= scale)
    read = f" ({inputs.shape.read_parameters / count:.0%} read by a token)" if inputs.shape.experts else ""
    return f"{inputs.model}, {parameters} parameters{read}; {counted(inputs.tokens, 'token')} of prompt and answer"


def _memory_table(plan: Plan, width: int | None) -> Text:
    """Return a row for each part of what is in memory, in GiB, with a column for each memory that is used."""
    tiers = [(name, tier) for name, tier in plan.tiers if tier.total]
    parts = dict.fromkeys(part for _, tier in tiers for part in tier.parts)
    rows = [[part, *(_number(tier.parts.get(part)) for _, tier in tiers)] for part in parts]
    rows.append(["all", *(_number(tier.total) for _, tier in tiers)])
    rows.append(["may be used", *("not known" if tier.limit is None else _number(tier.limit) for _, tier in tiers)])
    return table([Column("GiB"), *(Column(name, right=True) for name, _ in tiers)], rows, width)


def _number(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _known(size: int | None) -> str:
    return "memory not known" if size is None else size_text(size)


def _predictions(plan: Plan) -> Iterator[tuple[str, str]]:
    where, chosen = plan.placed, plan.chosen
    order = ", layer by layer" if where.by_layers else ""
    yield "prefill", f"{duration(plan.ttft.seconds)} to the first token{order}; bound by {plan.ttft.bound}"
    yield "plain", _speed(plan.plain)
    if chosen.method != "ar":
        yield chosen.method, _speed(chosen, f", {plan.speedup:.1f}x")
        drafted = f"a tree of {chosen.gamma2}, {chosen.depth} deep," if chosen.depth else f"{chosen.gamma2}"
        cache = f"; {counted(plan.budget, 'token')} in the retrieval cache" if plan.budget else ""
        yield "", f"{drafted} drafted, {chosen.tokens_per_verification:.1f} tokens a verification expected{cache}"
    yield "placement", _placement(plan)


def _speed(decoding: Decoding, more: str = "") -> str:
    tbt = decoding.tbt
    return f"{milliseconds(tbt.seconds)} ms a token, {1 / tbt.seconds:,.1f} tokens/s{more}; bound by {tbt.bound}"


def _placement(plan: Plan) -> str:
    """Return where keys, values, weights and experts are."""
    where, layers, shape = plan.placed, plan.inputs.shape.layers, plan.inputs.shape
    of = f"of {where.resident_layers} of {shape.kv_layers} layers"
    if plan.offload == "none":
        text = f"none: {'everything' if plan.is_whole else 'the KV cache'} on the device"
    elif where.uses_disk:
        text = f"disk: KV {of} in memory, of the others in {plan.inputs.placement.disk}"
    else:
        text = f"{plan.offload}: KV {of} resident"
        text += f", the host attends to {100 * plan.host_share:.0f} % of the rest" if plan.offload == "hybrid" else ""
    if where.weight_layers < layers:
        text += f"; weights of {where.weight_layers} of {layers} layers"
    if shape.experts is not None and where.away_layers:
        text += f"; experts of {where.away_layers} of {shape.experts.layers} layers in host memory"
    return text
