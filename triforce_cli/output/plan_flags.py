"""The command-line arguments that a plan stands for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.plan import Plan
from offload.settings.config import EXACT, Speculation
from offload.units import GIB


@dataclass(frozen=True, slots=True)
class Argument:
    """An option with its values, none for a switch; or, without an option, the values of a positional argument.

    `is_list`: its value is a list of which the plan has one element.
    """

    option: str | None
    values: tuple[str, ...] = ()
    is_list: bool = False


_SPECULATION = (
    "method",
    "draft",
    "budget",
    "chunk",
    "retrieval_kv",
    "gamma1",
    "gamma2",
    "middle",
    "tree",
    "tree_sampling",
)


def command_line(command: str, plan: Plan, arguments: Sequence[Argument]) -> str:
    """Return the whole line of `triforce <command>`: the plan's flags, then the other arguments that were given."""
    flags = flags_of(plan)
    for argument in arguments:
        # A profile is perhaps a file, which its name alone does not find.
        if argument.option in flags and (argument.option == "--profile" or argument.is_list):
            flags[flags.index(argument.option) + 1] = argument.values[0]
    others = [argument for argument in arguments if argument.option is None or argument.option not in flags]
    return _line(command, flags, others)


def repeated(command: str, arguments: Sequence[Argument], *changed: Argument) -> str:
    """Return the line of `triforce <command>` with the arguments that were given, some of them changed or added."""
    options = {each.option for each in changed}
    kept = [each for each in arguments if each.option is None or each.option not in options]
    return _line(command, [], [*changed, *kept])


def _line(command: str, flags: Sequence[str], arguments: Sequence[Argument]) -> str:
    options = [part for each in arguments if each.option is not None for part in (each.option, *each.values)]
    words = [word for each in arguments if each.option is None for word in each.values]
    if any(word.startswith("-") and word != "-" for word in words):
        words.insert(0, "--")
    return shlex.join(["triforce", command, *flags, *options, *words])


def flags_of(plan: Plan) -> list[str]:
    """Return the arguments of generate, summarize or bench that a plan stands for, without prompt or documents."""
    request, placement, settings = plan.request, plan.request.placement, plan.request.speculation
    # "none" would keep the weights on the device too
    mode = "auto" if plan.offload == "none" and plan.placed.weight_layers < request.shape.layers else plan.offload
    mode = "auto" if plan.placed.uses_disk else mode
    flags = ["--model", request.model, "--profile", request.hardware.name, "--offload", mode]
    if plan.offload != "none" and not plan.placed.uses_disk:
        flags += ["--resident-layers", str(plan.placed.resident_layers)]
    if plan.offload == "hybrid" and placement.host_share is not None:  # a planned one would not follow measured times
        flags += ["--host-share", f"{placement.host_share:g}"]
    if plan.placed.away_layers:
        kept = request.shape.experts.layers - plan.placed.away_layers
        flags += ["--experts", plan.placed.experts, "--expert-layers", str(kept)]
    elif placement.experts != "auto":
        flags += ["--experts", placement.experts]
    if placement.disk is not None:
        flags += ["--disk", placement.disk]
    for name in ("memory", "host_memory", "disk_limit"):
        if (size := getattr(placement, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", f"{size // GIB}GiB" if size % GIB == 0 else str(size)]
    if placement.link_gb_s is not None:
        flags += ["--link", f"{placement.link_gb_s:g}"]
    if request.itemsize == 4:
        flags += ["--dtype", "float32"]
    if request.quantize is not None:
        flags += ["--quantize", request.quantize]
    if request.kv != EXACT:
        flags += ["--kv", request.kv]
    for name in _SPECULATION:
        if (value := getattr(settings, name)) != Speculation.__dataclass_fields__[name].default:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return [*flags, "--prefill-chunk", str(request.prefill_chunk)]
