"""Suggestions for a request that does not fit: the cheapest changes, each planned again and checked to fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..architecture.weight_formats import rounded_bits
from ..hardware.rates import Hardware
from ..settings.config import QUANTIZE
from ..settings.kv_formats import BF16, PACKED_KV, PLAIN_KV
from ..settings.method_sizes import has_middle
from ..settings.placement_settings import PLANES
from ..units import GIB, size_text
from .placement import place
from .request import PlanRequest

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
    candidates = (each for part in (_placements, _sizes, _caps, _losses) for each in part(request))
    fitting = (each for each in candidates if place(each.request).fits)
    return tuple(islice((each for part in (fitting, _hardware(request, others)) for each in part), MAX_SUGGESTIONS))


def _placements(request: PlanRequest) -> Iterator[Suggestion]:
    placement = request.placement
    if request.packs and request.kv_format is PLAIN_KV and not request.has_one_memory:
        yield Suggestion(f"--kv {PACKED_KV.name}, which loses nothing", replace(request, kv=PACKED_KV.name))
    forced = {"offload": placement.offload in ("none", PLANES), "experts": placement.experts == "device"}
    for name in (name for name, is_forced in forced.items() if is_forced):
        changed = _placed(request, **{name: "auto"})
        kept = size_text(place(changed).host.total)
        yield Suggestion(f"--{name} auto, which keeps {kept} in host memory", changed)
    if placement.resident_layers is not None and placement.offload != "none":
        count = place(_placed(request, resident_layers=None)).resident_layers
        yield Suggestion(f"--resident-layers {count}", _placed(request, resident_layers=count))


def _sizes(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield a smaller prefill chunk, a smaller retrieval cache, and bf16 in place of fp32."""
    settings = request.speculation
    chunks = _halves(request.prefill_chunk, SMALLEST_CHUNK)
    yield from _first_fitting(chunks, lambda n: replace(request, prefill_chunk=n), "--set prefill_chunk={}")
    if has_middle(settings, request.tokens):
        smaller = _halves(request.budget, max(SMALLEST_BUDGET, 4 * settings.chunk))
        yield from _first_fitting(
            smaller, lambda n: replace(request, speculation=replace(settings, budget=n)), "--budget {}"
        )
    if request.itemsize == 4:
        yield Suggestion("--dtype bfloat16", replace(request, itemsize=2))


def _caps(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield the disk, and higher caps where the memory exists."""
    if request.placement.disk is None:
        what = "--disk with a folder on a fast drive, where a part of the KV cache then lies"
        yield Suggestion(what, _placed(request, disk="."))
    for name, tier_name, flag in _CAPS:
        tier = getattr(place(request), tier_name)
        if getattr(request.placement, name) is None or not tier.missing:
            continue
        uncapped = getattr(place(_placed(request, **{name: None})), tier_name)
        sizes = range(-(-tier.total // GIB), -(-max(uncapped.total, tier.total) // GIB) + 1)
        yield from _first_fitting(sizes, lambda size, name=name: _placed(request, **{name: size * GIB}), flag)


def _losses(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield the longest context that fits, and the finest level to which weights in bf16 can be rounded."""
    steps = range(1, -(-request.tokens // CONTEXT_STEP))  # more tokens never take less memory
    most = bisect_left(steps, True, key=lambda n: not place(replace(request, tokens=n * CONTEXT_STEP)).fits)
    if most:
        tokens = most * CONTEXT_STEP
        text = f"a context of {tokens:,} tokens or fewer, such as the parts of `summarize --map-reduce`"
        yield Suggestion(text, replace(request, tokens=tokens))
    if request.weight_bits is None and request.itemsize == 2 and request.hardware.dtype == "bf16":
        yield from _first_fitting(
            reversed(QUANTIZE),
            lambda level: replace(request, quantize=level, weight_bits=rounded_bits(request.shape, level)),
            "--quantize {} (lossy)",
        )


def _hardware(request: PlanRequest, others: Sequence[Hardware]) -> Iterator[Suggestion]:
    """Yield the smallest of the other machines that has room, by its device memory."""
    placement = replace(request.placement, memory=None, resident_layers=None, link_gb_s=None)
    kv = BF16 if request.kv_format is PACKED_KV else request.kv  # in one memory, only if asked for
    changed = replace(request, placement=placement, kv=kv, packs=False)
    for other in sorted(others, key=lambda one: (one.gpus * (one.memory or 0), one.gpus)):
        on_other = replace(changed, hardware=other)
        if other.device == "cuda" and other.name != request.hardware.name and place(on_other).fits:
            yield Suggestion(f"other hardware: {other.name}", on_other)
            return


def _placed(request: PlanRequest, **changes: Any) -> PlanRequest:
    return replace(request, placement=replace(request.placement, **changes))


def _halves(start: int, least: int) -> list[int]:
    """Return a half, a quarter, and so on of a number, down to `least`."""
    return [half for half in (start >> n for n in range(1, start.bit_length())) if half >= least]


def _first_fitting(numbers: Iterable[Any], change: Callable[[Any], PlanRequest], text: str) -> Iterator[Suggestion]:
    """Yield the change with the first number with which the request fits."""
    fitting = ((number, changed) for number in numbers if place(changed := change(number)).fits)
    for number, changed in islice(fitting, 1):
        yield Suggestion(text.format(number), changed)
