"""The Triton kernels of quantised weights: products with a few rows, and dequantising; layout: device_weight.py.

Codes become numbers in the activations' type, which is exact, and are multiplied with the activations; a group's sums
are then multiplied by its scale, and the minimum by the sum of the group's activations, all in fp32. The order is that
of the inputs: how they are divided among programs follows from the weight alone, so that a row's result does not depend
on the rows beside it.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl


@triton.jit
def widen_e4m3(codes):
    """Return e4m3 numbers, given as int8, in fp32. As fp16 with the same fields they are smaller by 2 ** 8."""
    bits = codes.to(tl.int16)
    return ((bits & 0x7F) << 7 | bits & -32768).to(tl.float16, bitcast=True).to(tl.float32) * 256


@triton.jit
def integers_to_fp32(integers, OFFSET: tl.constexpr):
    """Return integers from 0 to 2 ** 23 - 1 plus OFFSET in fp32, exactly: the mantissa of 2 ** 23, less that number.

    An instruction that converts takes as long as four to eight of these.
    """
    return (integers | 0x4B000000).to(tl.float32, bitcast=True) - (8388608 - OFFSET)


@triton.jit
def _sixteenths_to_fp32(integers, OFFSET: tl.constexpr):
    """Return multiples of 16 below 2 ** 23, divided by 16, plus OFFSET in fp32, exactly; see `integers_to_fp32`."""
    return (integers | 0x49000000).to(tl.float32, bitcast=True) - (524288 - OFFSET)


@triton.jit
def _load_levels(
    codes_ptr, high_ptr, levels_ptr, group, outputs, output, is_output,
    BITS: tl.constexpr, FIRST: tl.constexpr, HAS_TABLE: tl.constexpr, IS_FLOAT: tl.constexpr,
):  # fmt: skip
    """Return the levels of a group's first and last 16 inputs, two times `[n, 16]` in fp32."""
    column = tl.arange(0, 16)[None, :]
    mask = is_output[:, None]
    start = group * outputs  # in 32 bits, as are all numbers of groups
    if BITS == 8:
        place = codes_ptr + (start + output)[:, None] * 32 + column
        low, high = tl.load(place, mask=mask, other=0), tl.load(place + 16, mask=mask, other=0)
        if IS_FLOAT:
            return widen_e4m3(low), widen_e4m3(high)
        return low.to(tl.float32), high.to(tl.float32)
    both = tl.load(codes_ptr + (start + output)[:, None] * 16 + column, mask=mask, other=0).to(tl.int32)
    if BITS == 4 and not HAS_TABLE:
        return integers_to_fp32(both & 15, FIRST), _sixteenths_to_fp32(both & 240, FIRST)
    low, high = both & 15, both >> 4
    if BITS == 5:
        word = tl.load(high_ptr + start + output, mask=is_output, other=0)[:, None]
        low, high = low | (word >> column & 1) << 4, high | (word >> 16 + column & 1) << 4
    if BITS == 6:
        words = high_ptr + 2 * start + output
        word = tl.load(words, mask=is_output, other=0)[:, None]
        other = tl.load(words + outputs, mask=is_output, other=0)[:, None]
        low, high = low | (word >> 2 * column & 3) << 4, high | (other >> 2 * column & 3) << 4
    if HAS_TABLE:
        return tl.load(levels_ptr + low), tl.load(levels_ptr + high)
    return integers_to_fp32(low, FIRST), integers_to_fp32(high, FIRST)


@triton.jit
def _load_numbers(ptr, factors_ptr, index, group, outputs, output, is_output, NESTED: tl.constexpr):
    """Return scales or minima `[n]` in fp32: those of row `index`, with the outer factor of their group."""
    numbers = tl.load(ptr + index * outputs + output, mask=is_output, other=0).to(tl.float32)
    if NESTED:
        row = factors_ptr + group // 8 * outputs
        numbers = tl.load(row + output, mask=is_output, other=0).to(tl.float32) * numbers
    return numbers


@triton.jit
def _load_scales(
    scales_ptr, factors_ptr, minima_ptr, minimum_factors_ptr, group, outputs, output, is_output,
    NESTED: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Return the scales of a group's first and last 16 inputs, and its minimum: three times `[n]` in fp32."""
    index = 2 * group if HALVES else group // WIDE
    first = _load_numbers(scales_ptr, factors_ptr, index, group, outputs, output, is_output, NESTED)
    last, least = first, first
    if HALVES:
        last = _load_numbers(scales_ptr, factors_ptr, index + 1, group, outputs, output, is_output, NESTED)
    if HAS_MINIMUM:
        least = _load_numbers(minima_ptr, minimum_factors_ptr, group // WIDE, group, outputs, output, is_output, NESTED)
    return first, last, least


@triton.jit
def _store(
    sums, bias_ptr, y_ptr, output, row, stride_row, is_output, mask, HAS_BIAS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Store sums `[n, rows]` with the bias, and with what is in `y` if ADD."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)[:, None]
    places = y_ptr + row.to(tl.int64)[None, :] * stride_row + output[:, None]
    if ADD:
        sums += tl.load(places, mask=mask, other=0).to(tl.float32)
    tl.store(places, sums.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x_ptr, codes_ptr, high_ptr, scales_ptr, minima_ptr, factors_ptr, minimum_factors_ptr, levels_ptr, bias_ptr, y_ptr,
    rows, outputs, groups, each, stride_x, stride_y, stride_split,
    BITS: tl.constexpr, FIRST: tl.constexpr, HAS_TABLE: tl.constexpr, IS_FLOAT: tl.constexpr, NESTED: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Multiply rows with some outputs over `each` groups of inputs. Grid: (blocks of outputs, blocks of rows, splits).

    HALVES: half a group has a scale of its own. WIDE: so many groups share one, and a minimum.
    WIDEN multiplies in fp32, for the interpreter, which cannot multiply bf16.
    """
    split = tl.program_id(2)
    output = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_row = output < outputs, row < rows
    kind: tl.constexpr = tl.float32 if WIDEN else x_ptr.dtype.element_ty
    x_rows = x_ptr + row.to(tl.int64)[None, :] * stride_x + tl.arange(0, 16)[:, None]
    ones = tl.full([BLOCK_N, 16], 1.0, kind)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    start, end = split * each, tl.minimum(groups, (split + 1) * each)
    scale0, scale1, least = _load_scales(
        scales_ptr, factors_ptr, minima_ptr, minimum_factors_ptr,
        tl.minimum(start, groups - 1), outputs, output, is_output, NESTED, HALVES, WIDE, HAS_MINIMUM,
    )  # fmt: skip
    for group in tl.range(start, end, loop_unroll_factor=2):
        x0 = tl.load(x_rows + group * 32, mask=is_row[None, :], other=0.0).to(kind)
        x1 = tl.load(x_rows + group * 32 + 16, mask=is_row[None, :], other=0.0).to(kind)
        first, last = _load_levels(
            codes_ptr, high_ptr, levels_ptr, group, outputs, output, is_output, BITS, FIRST, HAS_TABLE, IS_FLOAT
        )
        # The compiler loads codes ahead by itself, but not what is multiplied with sums.
        ahead0, ahead1, ahead = _load_scales(
            scales_ptr, factors_ptr, minima_ptr, minimum_factors_ptr,
            tl.minimum(group + 1, groups - 1), outputs, output, is_output, NESTED, HALVES, WIDE, HAS_MINIMUM,
        )  # fmt: skip
        part = tl.dot(first.to(kind), x0, input_precision="ieee")
        if HALVES:
            sums += scale0[:, None] * part
            sums += scale1[:, None] * tl.dot(last.to(kind), x1, input_precision="ieee")
        else:
            sums += scale0[:, None] * tl.dot(last.to(kind), x1, part, input_precision="ieee")
        if HAS_MINIMUM:
            # A product with ones: the order of its sum is fixed, that of a reduction follows from the number of rows.
            part = tl.dot(ones, x0, input_precision="ieee")
            sums += least[:, None] * tl.dot(ones, x1, part, input_precision="ieee")
        scale0, scale1, least = ahead0, ahead1, ahead
    mask = is_output[:, None] & is_row[None, :]
    _store(sums, bias_ptr, y_ptr + split * stride_split, output, row, stride_y, is_output, mask, HAS_BIAS, ADD)


@triton.jit
def add_splits_kernel(
    sums_ptr, bias_ptr, y_ptr, splits, outputs, stride_split, stride_row, stride_y,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the sums `[splits, rows, outputs]`, which may be longer, in their order. Grid: (blocks of outputs, rows)."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) + tl.arange(0, 1)
    is_output = output < outputs
    sums = tl.zeros([BLOCK_N, 1], tl.float32)
    for split in range(0, splits):
        places = sums_ptr + split * stride_split + row.to(tl.int64)[None, :] * stride_row + output[:, None]
        sums += tl.load(places, mask=is_output[:, None], other=0.0)
    _store(sums, bias_ptr, y_ptr, output, row, stride_y, is_output, is_output[:, None], HAS_BIAS, ADD)


@triton.jit(do_not_specialize=["start", "count"])
def dequantize_kernel(
    codes_ptr, high_ptr, scales_ptr, minima_ptr, factors_ptr, minimum_factors_ptr, levels_ptr, ids_ptr, y_ptr,
    start, count, outputs, stride_y,
    BITS: tl.constexpr, FIRST: tl.constexpr, HAS_TABLE: tl.constexpr, IS_FLOAT: tl.constexpr, NESTED: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write `count` outputs' weights, from `start` on or those of the ids. Grid: (blocks of outputs, groups)."""
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    is_place = place < count
    output = (start + place).to(tl.int64)
    if HAS_IDS:
        output = tl.load(ids_ptr + place, mask=is_place, other=0)
    first, last = _load_levels(
        codes_ptr, high_ptr, levels_ptr, group, outputs, output, is_place, BITS, FIRST, HAS_TABLE, IS_FLOAT
    )
    scale0, scale1, least = _load_scales(
        scales_ptr, factors_ptr, minima_ptr, minimum_factors_ptr, group, outputs, output, is_place,
        NESTED, HALVES, WIDE, HAS_MINIMUM,
    )  # fmt: skip
    first, last = scale0[:, None] * first, scale1[:, None] * last
    if HAS_MINIMUM:
        first, last = first + least[:, None], last + least[:, None]
    places = y_ptr + place.to(tl.int64)[:, None] * stride_y + group * 32 + tl.arange(0, 16)[None, :]
    tl.store(places, first.to(y_ptr.dtype.element_ty), mask=is_place[:, None])
    tl.store(places + 16, last.to(y_ptr.dtype.element_ty), mask=is_place[:, None])
