"""A plan as command-line arguments, and plans as JSON fields (bytes, seconds and tokens)."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from offload.settings.config import Speculation
from offload.settings.kv_formats import BF16
from offload.settings.placement_settings import PLANES
from offload.units import GIB

if TYPE_CHECKING:  # every command imports this module, and few of them plan
    from offload.planning.batch import Batches
    from offload.planning.plan import Plan
    from offload.planning.suggestions import Suggestion


_SPECULATION = (
    "method",
    "draft",
    "budget",
    "chunk",
    "gamma1",
    "gamma2",
    "middle",
    "tree",
    "tree_sampling",
)


def command_line(command: str, plan: Plan, words: Sequence[str]) -> str:
    """Return the whole line of `triforce <command>`: the words that were typed, with the plan's options."""
    options = list(itertools.pairwise(flags_of(plan)))[::2]
    if any(word.partition("=")[0] == "--profile" for word in words):  # a file perhaps, which its name does not find
        options = [each for each in options if each[0] != "--profile"]
    return repeated(command, words, *options)


def repeated(
    command: str, words: Sequence[str], *options: tuple[str, ...], without: Sequence[tuple[str, ...]] = ()
) -> str:
    """Return the line of `triforce <command>` with the words that were typed, and with `options` added or replaced.

    An option is its name and its value, or the name alone. Those in `without` are left out.
    """
    end = words.index("--") if "--" in words else len(words)
    lengths = {each[0]: len(each) for each in (*options, *without) if each[0] != "--set"}
    assigned = {each[1].partition("=")[0] for each in options if each[0] == "--set"}
    kept: list[str] = []
    at = 0
    while at < end:
        name, _, value = words[at].partition("=")
        taken = 1 if value else lengths.get(name, 2 if name == "--set" else 1)
        is_set = name == "--set" and (value or words[at + 1]).partition("=")[0] in assigned
        kept += [] if name in lengths or is_set else words[at : at + taken]
        at += taken
    return shlex.join(["triforce", command, *kept, *(part for each in options for part in each), *words[end:]])


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
        flags += ["--set", f"host_share={placement.host_share:g}"]
    if plan.placed.away_layers:
        flags += ["--experts", plan.placed.experts]
    elif placement.experts != "auto":
        flags += ["--experts", placement.experts]
    if placement.disk is not None:
        flags += ["--disk", placement.disk]
    for name in ("memory", "host_memory", "disk_limit"):
        if (size := getattr(placement, name)) is not None:
            flags += flag_of(name, f"{size // GIB}GiB" if size % GIB == 0 else str(size))
    if placement.link_gb_s is not None:
        flags += ["--link", f"{placement.link_gb_s:g}"]
    if request.hardware.threads:
        flags += ["--threads", str(request.hardware.threads)]
    if request.itemsize == 4:
        flags += ["--dtype", "float32"]
    if request.quantize is not None:
        flags += ["--quantize", request.quantize]
    if request.kv != BF16:
        flags += ["--kv", request.kv]
    elif request.packs and plan.offload != "none":  # where the default would pack
        flags += ["--kv", "bf16"]
    if plan.offload == PLANES:  # which decides it
        settings = replace(settings, middle=None)
    for name in _SPECULATION:
        if (value := getattr(settings, name)) != Speculation.__dataclass_fields__[name].default:
            flags += flag_of(name, str(value))
    return [*flags, *flag_of("prefill_chunk", str(request.prefill_chunk))]


def flag_of(name: str, value: str) -> list[str]:
    """Return the arguments that give a setting a value: its own option, or --set."""
    own = ("memory", "host_memory", "method", "draft", "budget", "gamma2", "middle", "tree")
    return [f"--{name.replace('_', '-')}", value] if name in own else ["--set", f"{name}={value}"]


def plan_fields(plan: Plan, suggestions: Sequence[Suggestion] = ()) -> dict[str, Any]:
    request, where, experts = plan.request, plan.placed, plan.request.shape.experts
    return {
        "model": request.model,
        "parameters": request.shape.parameters,
        "quantize": request.quantize,
        "weight_bits": asdict(request.bits),
        "kv": request.kv,
        "resident_tokens": plan.resident_tokens,
        "context": request.tokens,
        "hardware": asdict(request.hardware),
        "offload": plan.offload,
        "layers": request.shape.layers,
        "resident_layers": where.resident_layers,
        "weight_layers": where.weight_layers,
        "host_share": plan.host_share,
        "experts": where.experts if request.shape.experts else None,
        "expert_layers": experts.layers - where.away_layers if experts else None,
        "expert_rows": where.streamed_rows or None,
        "expert_times": [asdict(each) for each in plan.expert_times],
        "budget": plan.budget,
        "chunk": request.speculation.chunk,
        "prefill_order": where.prefill_order,
        "prefill_chunk": request.prefill_chunk,
        "ttft": asdict(plan.ttft),
        "speedup": plan.speedup,
        "flags": flags_of(plan) if plan.fits else [],
        "ways_out": [suggestion.text for suggestion in suggestions],
    } | _predicted(plan)


def _predicted(plan: Plan) -> dict[str, Any]:
    """Return whether a plan fits, its memories and speeds; tokens a second are those of one sequence."""
    tiers = {"device": plan.device, "host": plan.host, "disk": plan.disk}
    return {
        "fits": plan.fits,
        "memory": {
            name: {"parts": tier.parts, "total": tier.total, "limit": tier.limit} for name, tier in tiers.items()
        },
        **{
            name: {**asdict(decoding), "tokens_per_s": 1 / decoding.tbt.seconds}
            for name, decoding in (("plain", plan.plain), ("chosen", plan.chosen))
        },
        "missing": plan.shortage() or None,
    }


_BATCH = ("sequences", "fits", "plain_tokens_per_s", "tokens_per_s", "plain_gain", "gain", "speedup")


def batch_fields(batches: Batches | None) -> dict[str, Any] | None:
    """Return the fields of plans for batches; None without any."""
    if batches is None:
        return None
    sizes = [_predicted(each.together) | {name: getattr(each, name) for name in _BATCH} for each in batches.plans]
    return {"fitting_sequences": batches.fitting, "shared_prefix": batches.shared, "sizes": sizes}
