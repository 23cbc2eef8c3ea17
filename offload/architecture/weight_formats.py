"""The formats of quantised weights, and which one a tensor gets when a model is rounded. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .dims import Dimensions, WeightBits

BLOCK_GROUPS = 8  # groups of 32 inputs whose scales share an outer factor, where they are nested
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of 4 bits (OCP Microscaling Formats 1.0, section 5.3.3)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Of experts: an error there may choose another one. Rates and decays of linear attention, and the gate of a shared
# expert, are as small, and scale what comes after them.
_ROUTERS = (
    *(".gate.weight", ".router.weight", ".router.layer.weight", ".kv_b_proj.weight"),
    *(".in_proj_ba.weight", ".in_proj_b.weight", ".in_proj_a.weight", ".shared_expert_gate.weight"),
)


@dataclass(frozen=True)
class QuantizedFormat:
    """A format of quantised weights: how codes become numbers.

    `bits` is 4, 5, 6 or 8. A scale belongs to `group` inputs, a minimum to 32. Nested scales and minima are integers
    times an fp16 factor for each block of 256 inputs. Wide ones are fp32 numbers, and both belong to `group` inputs:
    32, 64 or 128. `levels` are those of the codes in order, from -128 to 127; none where the codes are e4m3 numbers.
    """

    name: str
    bits: int
    group: int
    nested: bool
    has_minimum: bool
    levels: tuple[int, ...]
    wide: bool = False

    @property
    def block(self) -> int:
        """Return the inputs that lie together: a row has a multiple of them."""
        return 32 * BLOCK_GROUPS if self.nested else self.group if self.wide else 32

    @property
    def minimum_group(self) -> int:
        """Return the inputs that share a minimum."""
        return self.group if self.wide else 32

    @property
    def is_float(self) -> bool:
        """Return whether the codes are e4m3 numbers: the 8-bit floating point of torch's float8_e4m3fn."""
        return not self.levels

    @property
    def is_even(self) -> bool:
        """Return whether the levels are consecutive, so that a level is its code plus the first one."""
        return not self.is_float and self.levels == tuple(range(self.levels[0], self.levels[0] + len(self.levels)))

    @property
    def bits_per_weight(self) -> float:
        """Return the bits of a weight in memory, with its part of the scales and minima."""
        scale_bits = 8 if self.nested else 32 if self.wide else 16
        own = self.bits + scale_bits / self.group + (scale_bits / self.minimum_group if self.has_minimum else 0)
        return own + (16 * (1 + self.has_minimum) / self.block if self.nested else 0)


def _even(bits: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + 2**bits))


FORMATS = {
    format.name: format
    for format in (
        QuantizedFormat("Q4_0", 4, 32, False, False, _even(4, -8)),
        QuantizedFormat("Q4_1", 4, 32, False, True, _even(4, 0)),
        QuantizedFormat("Q5_0", 5, 32, False, False, _even(5, -16)),
        QuantizedFormat("Q5_1", 5, 32, False, True, _even(5, 0)),
        QuantizedFormat("Q8_0", 8, 32, False, False, _even(8, -128)),
        QuantizedFormat("Q4_K", 4, 32, True, True, _even(4, 0)),
        QuantizedFormat("Q5_K", 5, 32, True, True, _even(5, 0)),
        QuantizedFormat("Q6_K", 6, 16, True, False, _even(6, -32)),
        QuantizedFormat("IQ4_NL", 4, 32, False, False, _UNEVEN),
        QuantizedFormat("IQ4_XS", 4, 32, True, False, _UNEVEN),
        QuantizedFormat("MXFP4", 4, 32, False, False, (*_E2M1, *(-level for level in _E2M1))),
    )
}
_LEVELS = {"q4": FORMATS["Q4_1"], "q5": FORMATS["Q5_1"], "q6": FORMATS["Q6_K"], "q8": FORMATS["Q8_0"]}


def format_of(level: str, name: str, size: Sequence[int]) -> QuantizedFormat | None:
    """Return the format that a tensor gets at a level (q4, q5, q6, q8); None if it is not quantised.

    Matrices are quantised if their rows are multiples of 32 inputs. Embedding and output head get 8 bits, as errors
    there cost the most; and so do rows that the blocks of 256 inputs of 6 bits do not fit.
    """
    if len(size) != 2 or size[1] % 32 or name.endswith(_ROUTERS):
        return None
    kind = _LEVELS["q8" if name in (_EMBEDDING, _HEAD) else level]
    return kind if size[1] % kind.block == 0 else _LEVELS["q8"]


def level_of(bits: float) -> str | None:
    """Return the coarsest level whose weights have at least so many bits; None if they are not quantised."""
    return next((level for level, kind in _LEVELS.items() if kind.bits_per_weight >= bits), None)


def rounded_bits(shape: Dimensions, level: str) -> WeightBits:
    """Return the bits of a model's weights rounded to a level; those that are not, are bf16."""
    layers = _average("linears of a layer", shape.dense_linears(), level)
    outer = _average(_EMBEDDING, [(shape.hidden, shape.vocab)], level)
    experts = _average("linears of a layer", shape.expert_linears(), level)
    return WeightBits(layers, outer, experts if shape.experts and experts != layers else None)


def _average(name: str, linears: Iterable[tuple[int, int]], level: str) -> float:
    """Return the average bits of a weight of linears with so many inputs and outputs."""
    bits = weights = 0.0
    for inputs, outputs in linears:
        kind = format_of(level, name, (outputs, inputs))
        bits += inputs * outputs * (16 if kind is None else kind.bits_per_weight)
        weights += inputs * outputs
    return bits / max(weights, 1)
