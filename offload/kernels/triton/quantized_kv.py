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
from .quantized import _widen_e4m3


@triton.jit
def _load_levels(codes_ptr, line, byte, mask, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Return the levels in fp32 of codes that are at `byte` of a `line` of 64; of 4 bits, two lines share the bytes."""
    if BITS == 4:
        both = tl.load(codes_ptr + line // 2 * 64 + byte, mask=mask, other=0).to(tl.int32)
        return ((both >> line % 2 * 4 & 15 ^ 8) - 8).to(tl.float32)
    codes = tl.load(codes_ptr + line * 64 + byte, mask=mask, other=0).to(tl.int8, bitcast=True)
    if IS_FLOAT:
        return _widen_e4m3(codes)
    return codes.to(tl.float32)


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


@triton.jit(do_not_specialize=["rows", "first", "stop", "stride_split"])
def attend_groups_kernel(
    q_ptr, groups_ptr, state_ptr,
    rows, first, stop, scale,
    stride_qt, stride_qh, stride_head, stride_split, stride_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, FRESH: tl.constexpr,
    WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the keys of groups `first` to `stop` to the state of every row, which sees all of them.

    Grid: (kv_heads, blocks of rows, splits); see `attend_kernel`. A group is of 8 or 4 bits, or of e4m3 numbers if
    IS_FLOAT. Which split has a group follows from its number.
    """
    head, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, member = row // GROUP, head * GROUP + row % GROUP
    dims, inner = tl.arange(0, BLOCK_D), tl.arange(0, 32)
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

    lines: tl.constexpr = HEAD_DIM // 2  # of keys, and of values
    line_bytes: tl.constexpr = BITS * 8
    header: tl.constexpr = 4 * HEAD_DIM + 128
    group_bytes: tl.constexpr = header + 2 * lines * line_bytes
    t, d = inner[:, None], dims[None, :]
    key_line, key_byte = t // 16 * (HEAD_DIM // 4) + d // 4, t % 16 * 4 + d % 4
    value_line, value_byte = d // 16 * 8 + t % 16 // 2, d % 16 * 4 + t % 2 * 2 + t // 16
    here = is_dim[None, :] & (t < 32)
    begin = first + (split + splits - first % splits) % splits
    for number in range(begin, stop, splits):
        group = groups_ptr + head.to(tl.int64) * stride_head + number * group_bytes  # 32 bits: 3 million tokens
        numbers = group.to(tl.pointer_type(tl.bfloat16))
        key_scales = tl.load(numbers + dims, mask=is_dim, other=0.0).to(tl.float32)
        key_middles = tl.load(numbers + HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        keys = _load_levels(group + header, key_line, key_byte, here, BITS, IS_FLOAT)
        keys = keys * key_scales[None, :] + key_middles[None, :]
        logits = _products(q, keys, number_type, WIDEN) * scale
        weights, kept, top, total = add_logits(logits, top, total)
        value_scales = tl.load(numbers + 2 * HEAD_DIM + inner).to(tl.float32)
        value_middles = tl.load(numbers + 2 * HEAD_DIM + 32 + inner).to(tl.float32)
        codes = group + header + lines * line_bytes
        values = _load_levels(codes, value_line, value_byte, here, BITS, IS_FLOAT).to(number_type)
        scaled = (weights * value_scales[None, :]).to(number_type)
        if WIDEN:
            scaled, values = scaled.to(tl.float32), values.to(tl.float32)
        middle = tl.sum(weights * value_middles[None, :], 1)
        acc = acc * kept[:, None] + tl.dot(scaled, values, input_precision="ieee") + middle[:, None]
    store_state(state, dims, is_row, wanted, top, total, acc)
