"""Suggestions for a request that does not fit: the cheapest changes, each planned again and checked to fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..architecture.weight_formats import rounded_bits
from ..hardware.rates import Hardware
from ..settings.config import QUANTIZE
from ..settings.kv_formats import BF16, PACKED_KV, PLAIN_KV
from ..settings.method_sizes import has_draft_model, has_middle
from ..settings.placement_settings import PLANES
from ..units import GIB, counted
from .placement import place
from .request import PlanRequest

MAX_SUGGESTIONS = 3
SMALLEST_BUDGET = 256  # tokens; a smaller retrieval cache drafts badly
SMALLEST_CHUNK = 128  # tokens; prefill with fewer is slow
CONTEXT_STEP = 1024  # tokens between the contexts that are tried
_TIERS = {"memory": "device", "host_memory": "host", "disk_limit": "disk"}  # the tier that a cap limits


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that makes a request fit, and the changed request.

    `text` begins with the change and its number, such as a flag; what it brings follows after ", ".
    """

    text: str
    request: PlanRequest

    @property
    def change(self) -> str:
        """The text without what the change brings."""
        return self.text.partition(", ")[0]


def suggestions(request: PlanRequest, others: Sequence[Hardware] = ()) -> tuple[Suggestion, ...]:
    """Return up to three changes with which a request fits, the cheapest first; `others` is hardware to choose from.

    Changes that cost only time come first, then those that cost draft quality, then more memory, a shorter text,
    rounded weights, and other hardware.
    """
    found: list[Suggestion] = []
    for suggestion in _candidates(request, others):
        if place(suggestion.request).fits:
            found.append(suggestion)
        if len(found) == MAX_SUGGESTIONS:
            break
    return tuple(found)


def _candidates(request: PlanRequest, others: Sequence[Hardware]) -> Iterator[Suggestion]:
    yield from _placements(request)
    yield from _sizes(request)
    yield from _caps(request)
    yield from _contexts(request)
    yield from _rounded(request)
    yield from _hardware(request, others)


def _placements(request: PlanRequest) -> Iterator[Suggestion]:
    placement = request.placement
    if request.packs and request.kv_format is PLAIN_KV and not request.has_one_memory:
        yield Suggestion(f"--kv {PACKED_KV.name}, which loses nothing", replace(request, kv=PACKED_KV.name))
    if placement.offload == PLANES:
        changed = _placed(request, offload="auto")
        yield Suggestion("--offload auto, which needs no plane A on the device", changed)
    if placement.offload == "none":
        changed = _placed(request, offload="auto")
        placed = place(changed)
        offloaded = request.shape.layers - placed.weight_layers
        kv = "a part of the KV cache" if placed.resident_layers else "the KV cache"
        what = f"the weights of {counted(offloaded, 'layer')} and {kv}" if offloaded else kv
        if placed.away_layers:
            also = f" and {kv}" if placed.resident_layers < request.shape.kv_layers else ""
            what = f"the experts of {counted(placed.away_layers, 'layer')}{also}"
        yield Suggestion(f"--offload auto, which keeps {what} in host memory", changed)
    if request.shape.experts is not None and placement.experts == "device":
        what = "--experts auto, which keeps some experts in host memory"
        yield Suggestion(what, _placed(request, experts="auto"))
    if placement.resident_layers is not None and placement.offload != "none":
        count = place(_placed(request, resident_layers=None)).resident_layers
        yield Suggestion(f"--resident-layers {count}", _placed(request, resident_layers=count))


def _placed(request: PlanRequest, **changes: Any) -> PlanRequest:
    return replace(request, placement=replace(request.placement, **changes))


def _decoded(request: PlanRequest, **changes: Any) -> PlanRequest:
    return replace(request, speculation=replace(request.speculation, **changes))


def _sizes(request: PlanRequest) -> Iterator[Suggestion]:
    settings = request.speculation
    if request.prefill_chunk > SMALLEST_CHUNK:
        chunks = _halves(request.prefill_chunk, SMALLEST_CHUNK)
        yield from _first_fitting(chunks, lambda n: replace(request, prefill_chunk=n), "--set prefill_chunk={}")
    if has_middle(settings, request.tokens):
        smaller = _halves(request.budget, max(SMALLEST_BUDGET, 4 * settings.chunk))
        yield from _first_fitting(smaller, lambda n: _decoded(request, budget=n), "--budget {}")
        coarser = [n for n in (16, 32, 64) if settings.chunk < n <= request.budget // 4]
        yield from _first_fitting(coarser, lambda n: _decoded(request, chunk=n), "--set chunk={}")
    if has_middle(settings, request.tokens) or has_draft_model(settings):
        yield Suggestion("--method lookup, which needs no memory", _decoded(request, method="lookup"))
    if request.itemsize == 4:
        yield Suggestion("--dtype bfloat16", replace(request, itemsize=2))


def _caps(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield a higher cap, where the memory exists; and the disk."""
    if request.placement.disk is None:
        what = "--disk with a folder on a fast drive, where a part of the KV cache then lies"
        yield Suggestion(what, _placed(request, disk="."))
    for name in ("memory", "host_memory", "disk_limit"):
        if getattr(request.placement, name) is None:
            continue
        uncapped = place(_placed(request, **{name: None}))
        placed = place(request)
        tier, need = (getattr(each, _TIERS[name]) for each in (placed, uncapped))
        if not tier.missing:
            continue
        sizes = range(-(-tier.total // GIB), -(-max(need.total, tier.total) // GIB) + 1)

        def with_cap(size: int, name: str = name) -> PlanRequest:
            return _placed(request, **{name: size * GIB})

        flag = "--set disk_limit={}GiB" if name == "disk_limit" else f"--{name.replace('_', '-')} {{}}GiB"
        yield from _first_fitting(sizes, with_cap, flag)


def _contexts(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield the longest context that fits; more tokens never take less memory."""
    fitting, failing = 0, request.tokens // CONTEXT_STEP + 1
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if middle * CONTEXT_STEP < request.tokens and place(replace(request, tokens=middle * CONTEXT_STEP)).fits:
            fitting = middle
        else:
            failing = middle
    if fitting:
        tokens = fitting * CONTEXT_STEP
        text = f"a context of {tokens:,} tokens or fewer, such as the parts of `summarize --map-reduce`"
        yield Suggestion(text, replace(request, tokens=tokens))


def _rounded(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield the finest level to which the weights can be rounded, where they are bf16."""
    if request.weight_bits is not None or request.itemsize != 2 or request.hardware.dtype != "bf16":
        return

    def with_level(level: str) -> PlanRequest:
        return replace(request, quantize=level, weight_bits=rounded_bits(request.shape, level))

    yield from _first_fitting(reversed(QUANTIZE), with_level, "--quantize {} (lossy)")


def _hardware(request: PlanRequest, others: Sequence[Hardware]) -> Iterator[Suggestion]:
    """Yield the smallest of the other machines that has room, by its device memory."""
    for other in sorted(others, key=lambda one: (one.gpus * (one.memory or 0), one.gpus)):
        placement = replace(request.placement, memory=None, resident_layers=None, link_gb_s=None)
        if other.device == "cuda" and other.name != request.hardware.name:
            kv = BF16 if request.kv_format is PACKED_KV else request.kv  # in one memory, only if asked for
            changed = replace(request, hardware=other, placement=placement, kv=kv, packs=False)
            if place(changed).fits:
                yield Suggestion(f"other hardware: {other.name}", changed)
                return


def _halves(start: int, least: int) -> Iterator[int]:
    size = start // 2
    while size >= least:
        yield size
        size //= 2


def _first_fitting(numbers: Iterable[Any], change: Callable[[Any], PlanRequest], text: str) -> Iterator[Suggestion]:
    """Yield the change with the first number with which the request fits."""
    for number in numbers:
        changed = change(number)
        if place(changed).fits:
            yield Suggestion(text.format(number), changed)
            return
