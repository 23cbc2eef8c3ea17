"""The quantised copy of a model that drafts for it: its bits, and the level that promises most. Imports no torch."""

from collections.abc import Mapping

from ..architecture.dims import Dimensions
from ..architecture.parameters import WeightBits
from ..settings.config import QUANTIZE, Speculation
from ..settings.method_sizes import uses_copy
from ..speculation.passes.estimators import ATTENTION_COST, StepTimes, expected_tokens

# Bits of a weight, scales included, and the inputs that lie together: as in loading/formats/quantization.py.
_BITS = {"q4": 5.0, "q5": 6.0, "q6": 6.5625, "q8": 8.5}
_BLOCKS = {"q4": 32, "q5": 32, "q6": 256, "q8": 32}
# The step between rounded weights, relative to that of q4, for normally distributed ones. The share of tokens that
# rounding changes is in proportion: of a 135M model .35, .16, .07 and .02.
STEPS = {"q4": 1.0, "q5": 0.48, "q6": 0.24, "q8": 0.07}
_CHANGED = {False: 0.35, True: 0.1}  # tokens that q4 changes, of models below and above _LARGE parameters
_LARGE = 1_000_000_000
_SELECTED = 0.95  # rate at which the full cache accepts what the retrieval cache drafts with the same weights, at 8K
_GAMMAS = range(1, 13)


def copy_bits(shape: Dimensions, settings: Speculation) -> WeightBits | None:
    """Return the bits of the copy's weights; of the largest one, q8, if the level is not known. None without a copy."""
    return bits_at(shape, settings.self_level or QUANTIZE[-1]) if uses_copy(settings) else None


def bits_at(shape: Dimensions, level: str) -> WeightBits:
    """Return the bits of a copy's weights at a level: rows that its blocks do not fit, and the output head, are q8."""
    sizes = [(inputs, inputs * outputs) for inputs, outputs in shape.linears()]
    total = sum(count * _BITS["q8" if inputs % _BLOCKS[level] else level] for inputs, count in sizes)
    return WeightBits(total / sum(count for _, count in sizes), _BITS["q8"])


def copy_bytes(shape: Dimensions, bits: WeightBits) -> int:
    """Return the bytes of a copy: of its layers and its output head. The embedding is the model's own."""
    return shape.layers * shape.layer_bytes(bits) + int(shape.vocab * shape.hidden * bits.outer / 8)


def expected_agreements(changed: float) -> dict[str, float]:
    """Return for each level how often the copy chooses the model's token, if q4 changes this share of the choices."""
    return {level: 1 - min(changed * step, 0.95) for level, step in STEPS.items()}


def typical_agreements(shape: Dimensions) -> dict[str, float]:
    """Return `expected_agreements` of a model that has not been measured: large ones tolerate coarser rounding."""
    return expected_agreements(_CHANGED[shape.parameters > _LARGE])


def relative_costs(
    shape: Dimensions, weights: float, itemsize: int, tokens: int, budget: int, kv_cost: float = 1.0
) -> dict[str, float]:
    """Return for each level the time of the copy's step on the retrieval cache, relative to a plain step of the target.

    Both are taken as the bytes that they read: which format they are in matters little (docs/benchmarks.md).

    Args:
        weights: bytes of weights that a step of the target reads.
        itemsize: bytes of an element of KV.
        tokens: length of the sequence.
        budget: tokens in the retrieval cache.
        kv_cost: the time to read a byte of the full cache's KV, relative to the device's memory.
    """
    kv = ATTENTION_COST * shape.growing.kv_bytes(1, itemsize)
    plain = weights + kv_cost * kv * tokens
    kept = kv * min(budget, tokens)
    return {level: (shape.read_bytes(bits_at(shape, level)) + kept) / plain for level in QUANTIZE}


def best_level(agreements: Mapping[str, float], costs: Mapping[str, float]) -> str:
    """Return the level with which drafting and verifying take the fewest plain steps for a token."""
    return max(QUANTIZE, key=lambda level: tokens_per_step(_SELECTED * agreements[level], costs[level]))


def tokens_per_step(acceptance: float, cost: float) -> float:
    """Return the most tokens in the time of a plain step, by draft length; a drafted one takes `cost` of that time."""
    steps = StepTimes()
    return max(expected_tokens(acceptance, gamma) / (gamma * cost + steps.of(gamma + 1)) for gamma in _GAMMAS)
