"""The Triton kernel that packs keys and values without loss, a run of 128 tokens of a KV head in a program.

Its bytes are those of kernels/packed_kv.py.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl


@triton.jit
def _bases(memory, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return for each channel `[d]` the largest even exponent from which on 16 are those of the most of 128 tokens."""
    token, dim = tl.arange(0, 128)[:, None], tl.arange(0, BLOCK_D)[None, :]
    exponents = _load_bits(memory, token, dim, HEAD_DIM) >> 7 & 255
    is_number = (dim < HEAD_DIM) & (exponents < 255)
    lowest = tl.min(tl.min(tl.where(is_number, exponents, 254), 1), 0)
    highest = tl.max(tl.max(tl.where(is_number, exponents, 0), 1), 0)
    best, most = tl.max(exponents, 0) * 0 + 240, tl.max(exponents, 0) * 0 + 1
    for base in range(tl.maximum(lowest - 15, 0) // 2 * 2, tl.minimum(highest + 1, 242), 2):
        is_coded = (exponents >= base) & (exponents < tl.minimum(base + 16, 255))
        count = tl.sum(is_coded.to(tl.int32), 0)
        best, most = tl.where(count >= most, base, best), tl.maximum(most, count)
    return best


@triton.jit
def _load_bits(memory, token, dim, HEAD_DIM: tl.constexpr):
    """Return the bits of numbers of a run at `memory`, as integers."""
    numbers = tl.load(memory + token * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    return numbers.to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _word_at(number):
    """Return the place in a line's column, in bytes, of a number whose 5 bits say where it is; see types.h."""
    return number // 8 % 2 * 16 + number // 16 % 2 * 8 + number % 8


@triton.jit
def _place(token, dim, IS_VALUE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the line of a span's number, and the byte in the line."""
    if IS_VALUE:
        line = HEAD_DIM // 2 + dim // 32 * 16 + token // 2
        byte = dim // 16 % 2 * 32 + _word_at(dim % 16 * 2 + token % 2)
    else:
        line = dim // 2
        byte = token // 16 * 32 + _word_at(token % 16 * 2 + dim % 2)
    return line, byte


@triton.jit
def _pack_span(
    memory, bases, planes, patches, span, before, IS_VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Pack the keys or values of a span, of whose run `before` numbers are stored apart; return how many are then."""
    token, dim = tl.arange(0, 32)[:, None], tl.arange(0, BLOCK_D)[None, :]
    bits = _load_bits(memory + span * 32 * HEAD_DIM, token, dim, HEAD_DIM)
    exponents = bits >> 7 & 255
    codes = exponents - bases[None, :]
    is_coded = (codes >= 0) & (codes < 16) & (exponents < 255)
    high = (bits >> 8 & 128) | (codes & 1) << 6 | (bits >> 4 & 7) << 3 | codes >> 1
    line, byte = _place(token, dim, IS_VALUE, HEAD_DIM)
    plane_a = planes + span * (64 * HEAD_DIM)
    tl.store(plane_a + line * 64 + byte, tl.where(is_coded, high, 0).to(tl.uint8), mask=dim < HEAD_DIM)
    plane_b = planes + 256 * HEAD_DIM + span * (32 * HEAD_DIM)
    _store_digits(plane_b, tl.where(is_coded, bits & 15, 0), IS_VALUE, HEAD_DIM, BLOCK_D)

    is_apart = ((is_coded == 0) & (dim < HEAD_DIM)).to(tl.int32)
    of_dim = tl.sum(is_apart, 0)
    rank = before + (tl.cumsum(of_dim, 0) - of_dim)[None, :] + tl.cumsum(is_apart, 0) - is_apart
    if IS_VALUE:
        word = (token % 16 // 2 * HEAD_DIM + dim) * 2 + token % 2
    else:
        word = (dim // 2 * 16 + token % 16) * 2 + dim % 2
    patch = (token // 16 * 16 * HEAD_DIM + word) | bits << 16
    tl.store((patches + 8).to(tl.pointer_type(tl.int32)) + rank, patch, mask=(is_apart != 0) & (rank < 30))
    end = before + tl.sum(of_dim, 0)
    tl.store(patches + 2 * span + IS_VALUE, tl.minimum(end, 30).to(tl.uint8))
    return end


@triton.jit
def _store_digits(plane, digits, IS_VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the low digits of a span's numbers: two lines share bytes, those of tokens or dimensions 2 apart."""
    if IS_VALUE:
        first, second = tl.split(tl.permute(tl.reshape(digits, (8, 2, 2, BLOCK_D)), (0, 2, 3, 1)))
        token = tl.arange(0, 8)[:, None, None] * 4 + tl.arange(0, 2)[None, :, None]
        dim = tl.arange(0, BLOCK_D)[None, None, :]
    else:
        first, second = tl.split(tl.permute(tl.reshape(digits, (32, BLOCK_D // 4, 2, 2)), (0, 1, 3, 2)))
        token = tl.arange(0, 32)[:, None, None]
        dim = tl.arange(0, BLOCK_D // 4)[None, :, None] * 4 + tl.arange(0, 2)[None, None, :]
    line, byte = _place(token, dim, IS_VALUE, HEAD_DIM)
    tl.store(plane + line // 2 * 64 + byte, (first | second << 4).to(tl.uint8), mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["first", "count", "ring", "runs_a_row", "stride_plain"])
def pack_kernel(
    k_ptr, v_ptr, runs_ptr, fits_ptr, first, count, ring, runs_a_row, stride_plain,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pack runs from number `first` on, of which run r is plain run r modulo `ring` of its row; say whether they fit.

    Grid: (rows, count). A row is a layer's KV head.
    """
    row, number = tl.program_id(0).to(tl.int64), first + tl.program_id(1)
    header: tl.constexpr = (3 * HEAD_DIM + 128 + 63) // 64 * 64
    run = runs_ptr + (row * runs_a_row + number) * (header + 384 * HEAD_DIM)
    plain = row * stride_plain + (number % ring).to(tl.int64) * (128 * HEAD_DIM)
    dim = tl.arange(0, BLOCK_D)
    k_bases = _bases(k_ptr + plain, HEAD_DIM, BLOCK_D)
    tl.store(run + dim, (k_bases >> 1).to(tl.uint8), mask=dim < HEAD_DIM)
    v_bases = _bases(v_ptr + plain, HEAD_DIM, BLOCK_D)
    bases = run + HEAD_DIM + dim // 32 * 64 + dim // 16 % 2 * 32
    for half in tl.static_range(2):  # of both tokens of a pair
        tl.store(bases + _word_at(dim % 16 * 2 + half), (v_bases >> 1).to(tl.uint8), mask=dim < HEAD_DIM)
    planes, patches, apart = run + header, run + 3 * HEAD_DIM, first * 0
    for span in range(4):
        apart = _pack_span(k_ptr + plain, k_bases, planes, patches, span, apart, False, HEAD_DIM, BLOCK_D)
        apart = _pack_span(v_ptr + plain, v_bases, planes, patches, span, apart, True, HEAD_DIM, BLOCK_D)
    tl.store(fits_ptr + row * count + tl.program_id(1), (apart <= 30).to(tl.uint8))
