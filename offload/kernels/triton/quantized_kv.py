"""The Triton kernel of attention to quantised keys and values where they lie, with a running state; see attend.py.

They are the native kernel's groups of 32 tokens of a KV head (types.h; offload/kernels/kv_groups.py makes them), so
that a page in host memory is the same for both. Codes become numbers in registers.

Nothing is rounded but the weights, as everywhere: a key, in 16 bits, is multiplied as the sum of two numbers; values
are multiplied by their codes, which 16 bits represent exactly, and the weights by the values' scales.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl

from .attend import add_logits, load_state, store_state
from .quantized import integers_to_fp32


@triton.jit
def _levels(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the levels in fp32 of the signed bytes of words, in order: `[ROWS, COLUMNS, 4]`."""
    even = tl.join(integers_to_fp32(words & 255 ^ 128, -128), integers_to_fp32(words >> 16 & 255 ^ 128, -128))
    odd = tl.join(integers_to_fp32(words >> 8 & 255 ^ 128, -128), integers_to_fp32(words >> 24 & 255 ^ 128, -128))
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS, 4))


@triton.jit
def _load_keys(codes, token, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a group's levels of keys `[32, BLOCK_D]`. A word has 4 dimensions of a token."""
    column = tl.arange(0, BLOCK_D // 4)[None, :]
    t = token[:, None]
    place = (t // 16 * (HEAD_DIM // 4) + column) * 16 + t % 16
    words = tl.load(codes.to(tl.pointer_type(tl.int32)) + place, mask=column < HEAD_DIM // 4, other=0)
    return tl.reshape(_levels(words, 32, BLOCK_D // 4), (32, BLOCK_D))


@triton.jit
def _load_values(codes, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a group's levels of values `[32, BLOCK_D]`, tokens in the order of the words' codes: see `_tokens`."""
    line, d = tl.arange(0, 8)[:, None], tl.arange(0, BLOCK_D)[None, :]
    place = (d // 16 * 8 + line) * 16 + d % 16
    words = tl.load(codes.to(tl.pointer_type(tl.int32)) + place, mask=d < HEAD_DIM, other=0)
    levels = tl.permute(_levels(words, 8, BLOCK_D), (0, 2, 1))
    return tl.reshape(levels, (32, BLOCK_D))


@triton.jit
def _tokens():
    """Return the tokens of a group in the order of `_load_values`: 0, 16, 1, 17, 2, ..."""
    index = tl.arange(0, 32)
    return index % 2 * 16 + index // 2


@triton.jit
def _products(q, keys, number_type: tl.constexpr, WIDEN: tl.constexpr):
    """Return the products of queries and of keys in fp32, which are multiplied as the sum of two numbers in 16 bits."""
    first = keys.to(number_type)
    rest = (keys - first.to(tl.float32)).to(number_type)
    if WIDEN:
        first, rest = first.to(tl.float32), rest.to(tl.float32)
    found = tl.dot(q, tl.trans(first), input_precision="ieee")
    if number_type != tl.float32:
        found = tl.dot(q, tl.trans(rest), found, input_precision="ieee")
    return found


@triton.jit(do_not_specialize=["rows", "stop", "stride_split"])
def attend_groups_kernel(
    q_ptr, groups_ptr, state_ptr,
    rows, stop, scale,
    stride_qt, stride_qh, stride_head, stride_split, stride_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, FRESH: tl.constexpr,
    WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the keys of the first `stop` groups to the state of every row, which sees all of them.

    Grid: (kv_heads, blocks of rows, splits); see `attend_kernel`. Which split has a group follows from
    its number.
    """
    head, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, member = row // GROUP, head * GROUP + row % GROUP
    dims = tl.arange(0, BLOCK_D)
    is_row, is_dim = row < rows, dims < HEAD_DIM
    wanted = is_row[:, None] & is_dim[None, :]
    q = tl.load(
        q_ptr + token[:, None] * stride_qt + member[:, None] * stride_qh + dims[None, :], mask=wanted, other=0.0
    )
    number_type: tl.constexpr = q.dtype
    if WIDEN:
        q = q.to(tl.float32)
    state = state_ptr + split * stride_split + token.to(tl.int64) * stride_row + member * (HEAD_DIM + 2)
    top, total, acc = load_state(state, dims, is_row, wanted, FRESH, BLOCK_M, BLOCK_D)

    header: tl.constexpr = 4 * HEAD_DIM + 128
    part_bytes: tl.constexpr = 32 * HEAD_DIM  # of the keys' codes, and of the values'
    group_bytes: tl.constexpr = header + 2 * part_bytes
    inner = _tokens()
    for number in range(split, stop, splits):
        group = groups_ptr + head.to(tl.int64) * stride_head + number * group_bytes  # 32 bits: 3 million tokens
        numbers = group.to(tl.pointer_type(tl.bfloat16))
        key_scales = tl.load(numbers + dims, mask=is_dim, other=0.0).to(tl.float32)
        key_middles = tl.load(numbers + HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        keys = _load_keys(group + header, inner, HEAD_DIM, BLOCK_D)
        keys = keys * key_scales[None, :] + key_middles[None, :]
        logits = _products(q, keys, number_type, WIDEN) * scale
        weights, kept, top, total = add_logits(logits, top, total)
        value_scales = tl.load(numbers + 2 * HEAD_DIM + inner).to(tl.float32)
        value_middles = tl.load(numbers + 2 * HEAD_DIM + 32 + inner).to(tl.float32)
        values = _load_values(group + header + part_bytes, HEAD_DIM, BLOCK_D).to(number_type)
        scaled = (weights * value_scales[None, :]).to(number_type)
        if WIDEN:
            scaled, values = scaled.to(tl.float32), values.to(tl.float32)
        middle = tl.sum(weights * value_middles[None, :], 1)
        acc = acc * kept[:, None] + tl.dot(scaled, values, input_precision="ieee") + middle[:, None]
    store_state(state, dims, is_row, wanted, top, total, acc)
