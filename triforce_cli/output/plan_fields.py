"""A plan as command-line arguments, and plans as JSON fields (bytes, seconds and tokens)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from offload.settings.config import Speculation
from offload.settings.kv_formats import BF16
from offload.settings.placement_settings import PLANES
from offload.units import GIB

if TYPE_CHECKING:  # every command imports this module, and few of them plan
    from offload.planning.plan import Plan


_SPECULATION = ("method", "draft", "budget", "chunk", "gamma1", "gamma2", "middle", "tree", "tree_sampling")
_OWN_OPTIONS = ("method", "draft", "budget", "gamma2", "middle", "tree")  # others are given with --set


def command_line(command: str, plan: Plan, words: Sequence[str]) -> str:
    """Return the whole line of `triforce <command>`: the words that were typed, with the plan's options."""
    flags = flags_of(plan)
    options = list(zip(flags[::2], flags[1::2], strict=True))
    if any(word.partition("=")[0] in ("--gpu", "--profile") for word in words):  # perhaps a file
        options = [option for option in options if option[0] != "--gpu"]
    if "-m" in words:
        options = [option for option in options if option[0] != "--model"]
    return repeated(command, words, *options)


def repeated(command: str, words: Sequence[str], *options: tuple[str, ...]) -> str:
    """Return the line of `triforce <command>` with the words that were typed, and with `options` added or replaced.

    An option is its name and its value, or the name alone.
    """
    end = words.index("--") if "--" in words else len(words)
    lengths = {option[0]: len(option) for option in options if option[0] != "--set"}
    assigned = {option[1].partition("=")[0] for option in options if option[0] == "--set"}
    kept: list[str] = []
    at = 0
    while at < end:
        name, _, value = words[at].partition("=")
        taken = 1 if value else lengths.get(name, 2 if name == "--set" else 1)
        is_set = name == "--set" and (value or words[at + 1]).partition("=")[0] in assigned
        kept += [] if name in lengths or is_set else words[at : at + taken]
        at += taken
    return shlex.join(["triforce", command, *kept, *(part for option in options for part in option), *words[end:]])


def flags_of(plan: Plan) -> list[str]:
    """Return the arguments of generate, summarize or bench that a plan stands for, without prompt or documents."""
    inputs, placement, settings = plan.inputs, plan.inputs.placement, plan.inputs.speculation
    # "none" would keep the weights on the device too
    mode = "auto" if plan.offload == "none" and plan.placed.weight_layers < inputs.shape.layers else plan.offload
    mode = "auto" if plan.placed.uses_disk else mode
    flags = ["--model", inputs.model, "--gpu", inputs.hardware.name, "--offload", mode]
    if plan.offload != "none" and not plan.placed.uses_disk:
        flags += ["--resident-layers", str(plan.placed.resident_layers)]
    if plan.offload == "hybrid" and placement.host_share is not None:  # a planned one would not follow measured times
        flags += ["--set", f"host_share={placement.host_share:g}"]
    experts = "host" if plan.placed.away_layers else placement.experts
    kv: str | None = inputs.kv
    if kv == BF16 and not (inputs.packs and plan.offload != "none"):  # else the default would pack
        kv = None
    values = {
        "--experts": None if experts == "auto" else experts,
        "--disk": placement.disk,
        "--memory": _size(placement.memory),
        "--host-memory": _size(placement.host_memory),
        "--set": placement.disk_limit and f"disk_limit={_size(placement.disk_limit)}",
        "--link": placement.link_gb_s and f"{placement.link_gb_s:g}",
        "--threads": inputs.hardware.threads or None,
        "--dtype": "float32" if inputs.itemsize == 4 else None,
        "--quantize": inputs.quantize,
        "--kv": kv,
    }
    flags += [word for name, value in values.items() if value is not None for word in (name, str(value))]
    if plan.offload == PLANES:  # which decides it
        settings = replace(settings, middle=None)
    for name in _SPECULATION:
        if (value := getattr(settings, name)) != Speculation.__dataclass_fields__[name].default:
            is_option = name in _OWN_OPTIONS
            flags += [f"--{name}", str(value)] if is_option else ["--set", f"{name}={value}"]
    return [*flags, "--set", f"prefill_chunk={inputs.prefill_chunk}"]


def _size(size: int | None) -> str | None:
    return size if size is None else f"{size // GIB}GiB" if size % GIB == 0 else str(size)


def plan_fields(plan: Plan, suggestions: Sequence[str] = ()) -> dict[str, Any]:
    inputs, where, experts = plan.inputs, plan.placed, plan.inputs.shape.experts
    return {
        "model": inputs.model,
        "parameters": inputs.shape.parameters,
        "quantize": inputs.quantize,
        "weight_bits": asdict(inputs.bits),
        "kv": inputs.kv,
        "resident_tokens": plan.resident_tokens,
        "context": inputs.tokens,
        "hardware": asdict(inputs.hardware),
        "offload": plan.offload,
        "layers": inputs.shape.layers,
        "resident_layers": where.resident_layers,
        "weight_layers": where.weight_layers,
        "host_share": plan.host_share,
        "experts": None if experts is None else "host" if where.away_layers else "device",
        "expert_layers": experts.layers - where.away_layers if experts else None,
        "expert_rows": where.streamed_rows or None,
        "budget": plan.budget,
        "chunk": inputs.speculation.chunk,
        "prefill_order": "layers" if where.by_layers else "chunks",
        "prefill_chunk": inputs.prefill_chunk,
        "ttft": asdict(plan.ttft),
        "speedup": plan.speedup,
        "flags": flags_of(plan) if plan.fits else [],
        "ways_out": list(suggestions),
    } | _predicted(plan)


def _predicted(plan: Plan) -> dict[str, Any]:
    """Return whether a plan fits, its memories and speeds; tokens a second are those of one sequence."""
    tiers = {"device": plan.device, "host": plan.host, "disk": plan.disk}
    speeds = {"plain": plan.plain, "chosen": plan.chosen}
    return {
        "fits": plan.fits,
        "memory": {name: asdict(tier) | {"total": tier.total} for name, tier in tiers.items()},
        **{name: {**asdict(speed), "tokens_per_s": 1 / speed.tbt.seconds} for name, speed in speeds.items()},
        "missing": plan.shortage() or None,
    }
