"""Suggestions for a plan that does not fit: the cheapest changes, each placed again and checked to fit."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from ..architecture.weight_formats import rounded_bits
from ..settings.config import QUANTIZE
from ..settings.placement_settings import PLANES
from ..units import GIB
from .inputs import PlanInputs
from .placement import place

MAX_SUGGESTIONS = 3
SMALLEST_CHUNK = 128  # tokens; prefill with fewer is slow
CONTEXT_STEP = 1024  # tokens between the contexts that are tried
# Caps of memories: the setting, the tier that it limits, and its flag.
_CAPS = (
    ("memory", "device", "--memory {}GiB"),
    ("host_memory", "host", "--host-memory {}GiB"),
    ("disk_limit", "disk", "--set disk_limit={}GiB"),
)
Change = tuple[str, PlanInputs]  # in words, and the changed inputs


def suggestions(inputs: PlanInputs) -> tuple[Change, ...]:
    """Return up to three changes with which a plan fits, the cheapest first.

    Changes that cost only time come first, then more memory, a shorter text, and rounded weights.
    """
    fitting = (next((change for change in group if place(change[1]).fits), None) for group in _groups(inputs))
    return tuple(islice(filter(None, fitting), MAX_SUGGESTIONS))


def _groups(inputs: PlanInputs) -> Iterator[Iterator[Change]]:
    """Yield changes of one kind after the other, each with the mildest first."""
    placement = inputs.placement
    forced = {"offload": placement.offload in ("none", PLANES), "experts": placement.experts == "device"}
    yield from (iter([(f"--{name} auto", _placed(inputs, **{name: "auto"}))]) for name in forced if forced[name])
    if placement.resident_layers is not None and placement.offload != "none":
        yield iter([("no --resident-layers", _placed(inputs, resident_layers=None))])
    halves = (inputs.prefill_chunk >> n for n in range(1, inputs.prefill_chunk.bit_length()))
    chunks = [size for size in halves if size >= SMALLEST_CHUNK]
    yield ((f"--set prefill_chunk={size}", replace(inputs, prefill_chunk=size)) for size in chunks)
    if inputs.itemsize == 4:
        yield iter([("--dtype bfloat16", replace(inputs, itemsize=2))])
    if placement.disk is None:
        yield iter([("--disk with a folder on a fast drive", _placed(inputs, disk="."))])
    yield from (_caps(inputs, *cap) for cap in _CAPS)
    steps = range(1, -(-inputs.tokens // CONTEXT_STEP))  # more tokens never take less memory
    most = bisect_left(steps, True, key=lambda n: not place(replace(inputs, tokens=n * CONTEXT_STEP)).fits)
    if most:
        tokens = most * CONTEXT_STEP
        text = f"a context of {tokens:,} tokens or fewer, such as the parts of `triforce summarize`"
        yield iter([(text, replace(inputs, tokens=tokens))])
    if inputs.weight_bits is None and inputs.itemsize == 2 and inputs.hardware.dtype == "bf16":
        levels = ((level, rounded_bits(inputs.shape, level)) for level in reversed(QUANTIZE))
        yield (
            (f"--quantize {level} (lossy)", replace(inputs, quantize=level, weight_bits=bits)) for level, bits in levels
        )


def _caps(inputs: PlanInputs, name: str, tier_name: str, flag: str) -> Iterator[Change]:
    """Yield higher caps of a memory, where it exists and the cap is too low."""
    tier = getattr(place(inputs), tier_name)
    if getattr(inputs.placement, name) is None or not tier.missing:
        return
    uncapped = getattr(place(_placed(inputs, **{name: None})), tier_name)
    for size in range(-(-tier.total // GIB), -(-max(uncapped.total, tier.total) // GIB) + 1):
        yield flag.format(size), _placed(inputs, **{name: size * GIB})


def _placed(inputs: PlanInputs, **changes: Any) -> PlanInputs:
    return replace(inputs, placement=replace(inputs.placement, **changes))
