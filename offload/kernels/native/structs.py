"""What types.h declares, mirrored: sizes of the memory layout, and the structs that the kernel is called with."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint16, c_void_p

LAYOUT = 28  # as in types.h
BLOCK = 16  # tokens of a block, outputs of a panel
SPAN = 32  # tokens of a group of quantised keys and values
PIECE = 512  # tokens of a partial result
GROUP_INPUTS = 32  # of quantised weights: inputs whose codes lie together
MAX_HEAD_DIM = 576  # and any multiple of 16 below
LEVEL_COUNT = 64  # entries of a format's table of levels
FLOAT8, PACKED, PLANE = 9, 12, 13  # in place of the bits of a code
NESTED_GROUPS = 8  # groups of a block whose scales share an outer factor

_TYPES = {"p": c_void_p, "q": c_int64, "i": c_int32, "f": c_float}


def _fields(*groups: str) -> list[tuple[str, type]]:
    """Return the fields of a struct; each group is a type (pointer, 64 or 32 bits, float) and names of that type."""
    return [(name, _TYPES[kind]) for kind, *names in map(str.split, groups) for name in names]


class Attention(ctypes.Structure):
    _fields_ = _fields(
        "p q kv table out lse",
        "q head_stride table_stride seen",
        "i causal tokens kv_heads group head_dim wide narrow_out",
        "f scale",
        "p partials parents depths",
        "i nodes",
        "p quantized",
        "q quantized_stride",
        "p kv_format",
        "q window",
    )


class Merge(ctypes.Structure):
    _fields_ = _fields("p into partials out lse", "q rows pieces", "i head_dim narrow_out")


class Observation(ctypes.Structure):
    _fields_ = [("attention", Attention), *_fields("p received", "q stride")]


class KeyScores(ctypes.Structure):
    _fields_ = _fields("p query keys scores", "q head_stride stride count", "i heads head_dim wide")


class Product(ctypes.Structure):
    """`struct linear`."""

    _fields_ = _fields("p x weight bias onto y format", "q rows inputs outputs stride", "i wide wide_out")


class Rows(ctypes.Structure):
    """`struct norm`."""

    _fields_ = _fields("p x weight y", "q rows width heads stride", "f epsilon", "i wide")


class Rounding(ctypes.Structure):
    _fields_ = _fields("p weight codes scales minima", "q groups", "i bits wide fits")


class Delta(ctypes.Structure):
    _fields_ = _fields(
        "p rows gates conv decay bias state out",
        "q tokens width",
        "i key_heads value_heads key_dim value_dim kernel wide",
    )


class Quantize(ctypes.Structure):
    _fields_ = _fields(
        "p kv quantized groups keys values", "q head_stride quantized_stride count", "i head_dim wide", "p format"
    )


class Packing(ctypes.Structure):
    _fields_ = _fields("p kv packed runs fits", "q head_stride packed_stride count", "i head_dim plane")


class Append(ctypes.Structure):
    _fields_ = _fields(
        "p q k v cos sin rotated kv table",
        "q q_stride k_stride v_stride head_stride start",
        "i tokens stored heads kv_heads head_dim wide",
    )


class Pack(ctypes.Structure):
    _fields_ = _fields("p codes", "q row_stride group_stride row_bytes", "i halves", "p format weight", "q rows inputs")


class Unpack(ctypes.Structure):
    _fields_ = _fields("p weight format ids y", "q rows inputs", "i wide")


class Format(ctypes.Structure):
    _fields_ = [*_fields("i bits nested has_minimum wide base"), ("levels", c_uint16 * LEVEL_COUNT)]

    def block(self) -> tuple[int, int]:
        """Return the inputs of a block of weights, and its bytes for a panel of 16 outputs."""
        groups, numbers = NESTED_GROUPS if self.nested else self.wide or 1, 1 + self.has_minimum
        header = (2 if self.nested else 4 if self.wide else 0) * numbers
        scales = 0 if self.wide else (1 if self.nested else 2) * (numbers + (self.bits == 6))
        codes = GROUP_INPUTS * min(self.bits, 8) // 8
        return GROUP_INPUTS * groups, BLOCK * (header + groups * (codes + scales))


class Linears(ctypes.Structure):
    _fields_ = [("parts", ctypes.POINTER(Product)), *_fields("q outputs", "i count")]


class DecoderLayer(ctypes.Structure):
    """`struct layer`."""

    _fields_ = [
        *((name, Rows) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Linears) for name in ("qkv", "o", "gate_up", "down")),
    ]


class Sequence(ctypes.Structure):
    _fields_ = _fields(
        "p kv places table cos sin parents rotated",
        "q layer_stride head_stride table_layer table_stride start seen first",
        "i tokens stored nodes queries",
    )


class Pass(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("sequences", ctypes.POINTER(Sequence)),
        *_fields("p x", "q rows", "i first last count heads kv_heads head_dim wide", "f scale"),
    ]


# What `Kernel.run` takes: the number of each is its operation's. Then the others, in the order of `triforce_layout`.
OPERATIONS: tuple[type[ctypes.Structure], ...] = (
    *(Attention, Merge, Observation, KeyScores, Product, Rows, Rounding),
    *(Delta, Quantize, Packing, Append, Pack, Unpack, Pass),
)
STRUCTS: tuple[type[ctypes.Structure], ...] = (*OPERATIONS, Format, Linears, DecoderLayer, Sequence)
