"""Suggestions for a plan that does not fit: the cheapest changes, each placed again and checked to fit."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from ..architecture.weight_formats import rounded_bits
from ..hardware.rates import Hardware
from ..settings.config import QUANTIZE
from ..settings.kv_formats import BF16, PACKED_KV, PLAIN_KV
from ..settings.method_sizes import has_middle
from ..settings.placement_settings import PLANES
from ..units import GIB, size_text
from .inputs import PlanInputs
from .placement import place

MAX_SUGGESTIONS = 3
SMALLEST_BUDGET = 256  # tokens; a smaller retrieval cache drafts badly
SMALLEST_CHUNK = 128  # tokens; prefill with fewer is slow
CONTEXT_STEP = 1024  # tokens between the contexts that are tried
# Caps of memories: the setting, the tier that it limits, and its flag.
_CAPS = (
    ("memory", "device", "--memory {}GiB"),
    ("host_memory", "host", "--host-memory {}GiB"),
    ("disk_limit", "disk", "--set disk_limit={}GiB"),
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that makes a plan fit, and the changed inputs.

    `text` begins with the change and its number, such as a flag; what it brings follows after ", ".
    """

    text: str
    inputs: PlanInputs

    @property
    def change(self) -> str:
        """The text without what the change brings."""
        return self.text.partition(", ")[0]

    @property
    def fits(self) -> bool:
        return place(self.inputs).fits


def suggestions(inputs: PlanInputs, others: Sequence[Hardware] = ()) -> tuple[Suggestion, ...]:
    """Return up to three changes with which a plan fits, the cheapest first; `others` is hardware to choose from.

    Changes that cost only time come first, then those that cost draft quality, then more memory, a shorter text,
    rounded weights, and other hardware.
    """
    changes = chain(*(part(inputs) for part in (_placements, _sizes, _caps, _losses)), _hardware(inputs, others))
    return tuple(islice((change for change in changes if change.fits), MAX_SUGGESTIONS))


def _placements(inputs: PlanInputs) -> Iterator[Suggestion]:
    placement = inputs.placement
    if inputs.packs and inputs.kv_format is PLAIN_KV and not inputs.has_one_memory:
        yield Suggestion(f"--kv {PACKED_KV.name}, which loses nothing", replace(inputs, kv=PACKED_KV.name))
    forced = {"offload": placement.offload in ("none", PLANES), "experts": placement.experts == "device"}
    for name in (name for name, is_forced in forced.items() if is_forced):
        changed = _placed(inputs, **{name: "auto"})
        kept = size_text(place(changed).host.total)
        yield Suggestion(f"--{name} auto, which keeps {kept} in host memory", changed)
    if placement.resident_layers is not None and placement.offload != "none":
        count = place(_placed(inputs, resident_layers=None)).resident_layers
        yield Suggestion(f"--resident-layers {count}", _placed(inputs, resident_layers=count))


def _sizes(inputs: PlanInputs) -> Iterator[Suggestion]:
    """Yield a smaller prefill chunk, a smaller retrieval cache, and bf16 in place of fp32."""
    settings = inputs.speculation
    chunks = _halves(inputs.prefill_chunk, SMALLEST_CHUNK)
    yield from _first(Suggestion(f"--set prefill_chunk={n}", replace(inputs, prefill_chunk=n)) for n in chunks)
    if has_middle(settings, inputs.tokens):
        budgets = _halves(inputs.budget, max(SMALLEST_BUDGET, 4 * settings.chunk))
        changed = ((n, replace(inputs, speculation=replace(settings, budget=n))) for n in budgets)
        yield from _first(Suggestion(f"--budget {n}", smaller) for n, smaller in changed)
    if inputs.itemsize == 4:
        yield Suggestion("--dtype bfloat16", replace(inputs, itemsize=2))


def _caps(inputs: PlanInputs) -> Iterator[Suggestion]:
    """Yield the disk, and higher caps where the memory exists."""
    if inputs.placement.disk is None:
        what = "--disk with a folder on a fast drive, where a part of the KV cache then lies"
        yield Suggestion(what, _placed(inputs, disk="."))
    for name, tier_name, flag in _CAPS:
        tier = getattr(place(inputs), tier_name)
        if getattr(inputs.placement, name) is None or not tier.missing:
            continue
        uncapped = getattr(place(_placed(inputs, **{name: None})), tier_name)
        sizes = range(-(-tier.total // GIB), -(-max(uncapped.total, tier.total) // GIB) + 1)
        changed = ((size, _placed(inputs, **{name: size * GIB})) for size in sizes)
        yield from _first(Suggestion(flag.format(size), larger) for size, larger in changed)


def _losses(inputs: PlanInputs) -> Iterator[Suggestion]:
    """Yield the longest context that fits, and the finest level to which weights in bf16 can be rounded."""
    steps = range(1, -(-inputs.tokens // CONTEXT_STEP))  # more tokens never take less memory
    most = bisect_left(steps, True, key=lambda n: not place(replace(inputs, tokens=n * CONTEXT_STEP)).fits)
    if most:
        tokens = most * CONTEXT_STEP
        text = f"a context of {tokens:,} tokens or fewer, such as the parts of `summarize --map-reduce`"
        yield Suggestion(text, replace(inputs, tokens=tokens))
    if inputs.weight_bits is None and inputs.itemsize == 2 and inputs.hardware.dtype == "bf16":
        finest = ((level, rounded_bits(inputs.shape, level)) for level in reversed(QUANTIZE))
        yield from _first(
            Suggestion(f"--quantize {level} (lossy)", replace(inputs, quantize=level, weight_bits=bits))
            for level, bits in finest
        )


def _hardware(inputs: PlanInputs, others: Sequence[Hardware]) -> Iterator[Suggestion]:
    """Yield the smallest of the other machines that has room, by its device memory."""
    placement = replace(inputs.placement, memory=None, resident_layers=None, link_gb_s=None)
    kv = BF16 if inputs.kv_format is PACKED_KV else inputs.kv  # in one memory, only if asked for
    changed = replace(inputs, placement=placement, kv=kv, packs=False)
    gpus = [other for other in others if other.device == "cuda" and other.name != inputs.hardware.name]
    gpus.sort(key=lambda gpu: (gpu.gpus * (gpu.memory or 0), gpu.gpus))
    yield from _first(Suggestion(f"other hardware: {gpu.name}", replace(changed, hardware=gpu)) for gpu in gpus)


def _placed(inputs: PlanInputs, **changes: Any) -> PlanInputs:
    return replace(inputs, placement=replace(inputs.placement, **changes))


def _halves(start: int, least: int) -> list[int]:
    """Return a half, a quarter, and so on of a number, down to `least`."""
    return [half for half in (start >> n for n in range(1, start.bit_length())) if half >= least]


def _first(changes: Iterator[Suggestion]) -> Iterator[Suggestion]:
    """Yield the first change that fits, if any does."""
    yield from islice((change for change in changes if change.fits), 1)
