"""What types.h declares: sizes of the memory layout, and the structs that the kernel is called with."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint16, c_void_p

LAYOUT = 25  # as in types.h
BLOCK = 16  # tokens of a block, outputs of a panel
SPAN = 32  # tokens of a group of quantised keys and values
PIECE = 512  # tokens of a partial result
GROUP_INPUTS = 32  # of quantised weights: inputs whose codes lie together
MAX_HEAD_DIM = 512  # and any multiple of 16 below


class Attention(ctypes.Structure):
    """`struct attention` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "kv", "table", "out", "lse")),
        *((name, c_int64) for name in ("head_stride", "table_stride", "seen")),
        *((name, c_int32) for name in ("causal", "tokens", "kv_heads", "group", "head_dim", "wide", "narrow_out")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("partials", "parents", "depths")),
        ("nodes", c_int32),
        ("quantized", c_void_p),
        ("quantized_stride", c_int64),
        ("kv_format", c_void_p),
        ("window", c_int64),
    )


class Observation(ctypes.Structure):
    """`struct observation` of types.h."""

    _fields_ = (("attention", Attention), ("received", c_void_p), ("stride", c_int64))


class KeyScores(ctypes.Structure):
    """`struct key_scores` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "scores")),
        *((name, c_int64) for name in ("head_stride", "stride", "count")),
        *((name, c_int32) for name in ("heads", "head_dim", "wide")),
    )


class Merge(ctypes.Structure):
    """`struct merge` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("into", "partials", "out", "lse")),
        *((name, c_int64) for name in ("rows", "pieces")),
        *((name, c_int32) for name in ("head_dim", "narrow_out")),
    )


class Append(ctypes.Structure):
    """`struct append` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin", "rotated", "kv", "table")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", "head_stride", "start")),
        *((name, c_int32) for name in ("tokens", "stored", "heads", "kv_heads", "head_dim", "wide")),
    )


class Product(ctypes.Structure):
    """`struct linear` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "onto", "y", "format")),
        *((name, c_int64) for name in ("rows", "inputs", "outputs", "stride")),
        *((name, c_int32) for name in ("wide", "wide_out")),
    )


LEVEL_COUNT = 64  # entries of a format's table of levels
FLOAT8, PACKED, PLANE = 9, 12, 13  # in place of the bits of a code, as in types.h
NESTED_GROUPS = 8  # groups of a block whose scales share an outer factor


class Format(ctypes.Structure):
    """`struct format` of types.h."""

    _fields_ = (
        *((name, c_int32) for name in ("bits", "nested", "has_minimum", "wide", "base")),
        ("levels", c_uint16 * LEVEL_COUNT),
    )

    def block(self) -> tuple[int, int]:
        """Return the inputs of a block of weights, and its bytes for a panel of 16 outputs."""
        groups, numbers = NESTED_GROUPS if self.nested else self.wide or 1, 1 + self.has_minimum
        header = (2 if self.nested else 4 if self.wide else 0) * numbers
        scales = 0 if self.wide else (1 if self.nested else 2) * (numbers + (self.bits == 6))
        codes = GROUP_INPUTS * min(self.bits, 8) // 8
        return GROUP_INPUTS * groups, BLOCK * (header + groups * (codes + scales))


class Pack(ctypes.Structure):
    """`struct pack` of types.h."""

    _fields_ = (
        ("codes", c_void_p),
        *((name, c_int64) for name in ("row_stride", "group_stride")),
        ("halves", c_int32),
        *((name, c_void_p) for name in ("format", "weight")),
        *((name, c_int64) for name in ("rows", "inputs")),
    )


class Quantize(ctypes.Structure):
    """`struct quantize` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv", "quantized", "groups", "keys", "values")),
        *((name, c_int64) for name in ("head_stride", "quantized_stride", "count")),
        *((name, c_int32) for name in ("head_dim", "wide")),
        ("format", c_void_p),
    )


class Packing(ctypes.Structure):
    """`struct packing` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv", "packed", "runs", "fits")),
        *((name, c_int64) for name in ("head_stride", "packed_stride", "count")),
        *((name, c_int32) for name in ("head_dim", "plane")),
    )


class Rounding(ctypes.Structure):
    """`struct rounding` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "codes", "scales", "minima")),
        ("groups", c_int64),
        *((name, c_int32) for name in ("bits", "wide", "fits")),
    )


class Unpack(ctypes.Structure):
    """`struct unpack` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "format", "ids", "y")),
        *((name, c_int64) for name in ("rows", "inputs")),
        ("wide", c_int32),
    )


class Rows(ctypes.Structure):
    """`struct norm` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "y")),
        *((name, c_int64) for name in ("rows", "width", "heads", "stride")),
        ("epsilon", c_float),
        ("wide", c_int32),
    )


class Linears(ctypes.Structure):
    """`struct linears` of types.h."""

    _fields_ = (("parts", ctypes.POINTER(Product)), ("outputs", c_int64), ("count", c_int32))


class DecoderLayer(ctypes.Structure):
    """`struct layer` of types.h."""

    _fields_ = (
        *((name, Rows) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Linears) for name in ("qkv", "o", "gate_up", "down")),
    )


class Sequence(ctypes.Structure):
    """`struct sequence` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv", "places", "table", "cos", "sin", "parents", "rotated")),
        *((name, c_int64) for name in ("layer_stride", "head_stride", "table_layer", "table_stride")),
        *((name, c_int64) for name in ("start", "seen", "first")),
        *((name, c_int32) for name in ("tokens", "stored", "nodes", "queries")),
    )


class Pass(ctypes.Structure):
    """`struct pass` of types.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("sequences", ctypes.POINTER(Sequence)),
        ("x", c_void_p),
        ("rows", c_int64),
        *((name, c_int32) for name in ("first", "last", "count", "heads", "kv_heads", "head_dim", "wide")),
        ("scale", c_float),
    )


class Delta(ctypes.Structure):
    """`struct delta` of types.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "gates", "conv", "decay", "bias", "state", "out")),
        *((name, c_int64) for name in ("tokens", "width")),
        *((name, c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "wide")),
    )


STRUCTS: tuple[type[ctypes.Structure], ...] = (  # in the order of `triforce_layout`
    *(Attention, Append, Product, Rows, Merge, Format, Unpack, Pack, Rounding, Quantize),
    *(Observation, KeyScores, Delta, Packing, Linears, DecoderLayer, Sequence, Pass),
)
