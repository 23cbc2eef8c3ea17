"""The Triton kernels of keys and values packed without loss: attention, which decodes in its loop, and unpacking.

They are the native kernel's runs of 128 tokens of a KV head (types.h). A tile of keys is a part of a packed run, or of
plain memory: in both cases the same numbers in the same order, so attention has the bits of `attend_kernel`.

A word of plane A has a byte of 4 numbers; of plane B, the low digits of 4 numbers of two lines. Digits are put together
for 4 numbers at once, and words are read in the order of memory: which numbers are in them is a matter of the index.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl

from .attend import add_logits, load_state, store_state


@triton.jit
def _pairs(high, low, base):
    """Return pairs of bf16 `[..., 2]` of words of 4 bytes: of bytes 0 and 2, and of 1 and 3.

    `low` has their low digits; `base` half of the exponents that their channels' codes count from.
    """
    top = (high & 0x87878787) + base
    rest = (high << 1) & 0xF0F0F0F0 | low
    return tl.join((top << 8) & 0xFF00FF00 | rest & 0x00FF00FF, top & 0xFF00FF00 | (rest >> 8) & 0x00FF00FF)


@triton.jit
def _load_pairs(
    words, span, first_base, second_base, IS_VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, SPANS: tl.constexpr,
    BLOCK_D: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    """Return pairs of keys or values of a run's SPANS from `span` on, `[SPANS, BLOCK_D / 4, 16, 2, 2]`.

    Two lines of 16 words lie one behind the other in plane A at `words`, and share one in plane B.
    """
    number = span + tl.arange(0, SPANS)[:, None, None]
    line, word = tl.arange(0, BLOCK_D // 4)[None, :, None], tl.arange(0, 16)[None, None, :]
    is_line = line < HEAD_DIM // 4
    plane_a = words + IS_VALUE * 8 * HEAD_DIM + number * (16 * HEAD_DIM) + line * 32 + word
    first, second = tl.load(plane_a, mask=is_line, other=0), tl.load(plane_a + 16, mask=is_line, other=0)
    if PLANE:
        low, high = 0x08080808, 0x08080808  # half a step
    else:
        plane_b = words + (64 + IS_VALUE * 4) * HEAD_DIM + number * (8 * HEAD_DIM) + line * 16 + word
        digits = tl.load(plane_b, mask=is_line, other=0)
        low, high = digits & 0x0F0F0F0F, (digits >> 4) & 0x0F0F0F0F
    return tl.join(_pairs(first, low, first_base), _pairs(second, high, second_base))


@triton.jit
def _halves(pairs):
    """Return the bits of both numbers of pairs, `[..., 2]`."""
    return tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))


@triton.jit
def _load_run(
    run, span, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEADER: tl.constexpr,
    PLANE: tl.constexpr,
):  # fmt: skip
    """Return keys and values `[BLOCK_N, BLOCK_D]` of a packed run's spans from `span` on, in bf16."""
    spans: tl.constexpr = BLOCK_N // 32
    words = (run + HEADER).to(tl.pointer_type(tl.uint32))
    line, word = tl.arange(0, BLOCK_D // 4)[None, :, None], tl.arange(0, 16)[None, None, :]
    is_line = line < HEAD_DIM // 4
    bases = run.to(tl.pointer_type(tl.uint16)) + 2 * line  # of two dimensions; a word has two tokens
    first = tl.load(bases, mask=is_line, other=0).to(tl.uint32) * 0x10001
    second = tl.load(bases + 1, mask=is_line, other=0).to(tl.uint32) * 0x10001
    keys = _load_pairs(words, span, first, second, False, HEAD_DIM, spans, BLOCK_D, PLANE)
    bases = (run + HEAD_DIM).to(tl.pointer_type(tl.uint32)) + line // 8 * 16 + word
    base = tl.load(bases, mask=is_line, other=0)
    values = _load_pairs(words, span, base, base, True, HEAD_DIM, spans, BLOCK_D, PLANE)
    keys, values = _patched(keys, values, run + 3 * HEAD_DIM, span, HEAD_DIM, spans, BLOCK_D)
    # Keys: span, 4 dimensions, then bits of the token 4, 2, 3, 1, of the dimension 0, 1, and of the token 0.
    keys = tl.reshape(_halves(keys), (spans, BLOCK_D // 4, 2, 2, 2, 2, 2, 2, 2))
    keys = tl.reshape(tl.permute(keys, (0, 2, 4, 3, 5, 8, 1, 7, 6)), (BLOCK_N, BLOCK_D))
    # Values: span, 32 dimensions, 4 tokens, then bits of the dimension 4, 2, 3, 1, of the token 0, 1, the dimension 0.
    values = tl.reshape(_halves(values), (spans, BLOCK_D // 32, 8, 2, 2, 2, 2, 2, 2, 2))
    values = tl.reshape(tl.permute(values, (0, 2, 8, 7, 1, 3, 5, 4, 6, 9)), (BLOCK_N, BLOCK_D))
    return keys.to(tl.bfloat16, bitcast=True), values.to(tl.bfloat16, bitcast=True)


@triton.jit
def _word_of(number):
    """Return which word of a column of a line has the number with these 5 bits, the last of which does not count."""
    return number // 16 % 2 * 8 + number // 4 % 2 * 4 + number // 8 % 2 * 2 + number // 2 % 2


@triton.jit
def _patched(keys, values, memory, span, HEAD_DIM: tl.constexpr, SPANS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pairs of keys and values in which the few that are stored apart, at `memory`, are as they were."""
    lines: tl.constexpr = BLOCK_D // 4
    index = tl.arange(0, SPANS)[:, None, None, None, None] * (64 * lines)
    index += tl.arange(0, lines)[None, :, None, None, None] * 64 + tl.arange(0, 16)[None, None, :, None, None] * 4
    index += tl.arange(0, 2)[None, None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    ends = tl.load(memory + tl.arange(0, 8)).to(tl.int32)
    begin = tl.sum(tl.where(tl.arange(0, 8) == 2 * span - 1, ends, 0), 0)
    end = tl.sum(tl.where(tl.arange(0, 8) == 2 * (span + SPANS) - 1, ends, 0), 0)
    for number in range(begin, end):
        patch = tl.load((memory + 8 + 4 * number).to(tl.pointer_type(tl.uint32)))
        of_list = tl.sum((ends <= number).to(tl.int32), 0)  # keys of a span, its values, keys of the next one
        at, bits = (patch & 0xFFFF).to(tl.int32), patch >> 16
        second_block, word = at // (16 * HEAD_DIM), at % (16 * HEAD_DIM)
        line = (of_list // 2 - span) * lines
        if of_list % 2 == 0:
            t, d = second_block * 16 + word // 2 % 16, word // 32 * 2 + word % 2
            place = ((line + d // 4) * 16 + _word_of(t)) * 4 + d % 2 * 2 + d // 2 % 2
            shift = t % 2 * 16
            keys = tl.where(index == place, keys & (0xFFFF << (16 - shift)).to(tl.uint32) | bits << shift, keys)
        else:
            t, d = second_block * 16 + word // 2 // HEAD_DIM * 2 + word % 2, word // 2 % HEAD_DIM
            place = ((line + d // 32 * 8 + t // 4) * 16 + _word_of(d % 32)) * 4 + t % 2 * 2 + t // 2 % 2
            shift = d % 2 * 16
            values = tl.where(index == place, values & (0xFFFF << (16 - shift)).to(tl.uint32) | bits << shift, values)
    return keys, values


@triton.jit
def _load_tile(
    runs, place, first, k_head, v_head, is_key, stride_token, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    """Return keys and values `[BLOCK_N, BLOCK_D]` of a run at `place`, from its token `first` on, a multiple of 32."""
    header: tl.constexpr = (3 * HEAD_DIM + 128 + 63) // 64 * 64
    if place < 0:
        run = runs + (~place).to(tl.int64) * (header + (256 if PLANE else 384) * HEAD_DIM)
        k, v = _load_run(run, first // 32, HEAD_DIM, BLOCK_N, BLOCK_D, header, PLANE)
    else:
        dims = tl.arange(0, BLOCK_D)[None, :]
        at = (place.to(tl.int64) * 128 + first + tl.arange(0, BLOCK_N))[:, None] * stride_token + dims
        here = is_key[:, None] & (dims < HEAD_DIM)
        k, v = tl.load(k_head + at, mask=here, other=0.0), tl.load(v_head + at, mask=here, other=0.0)
    return k, v


@triton.jit(do_not_specialize=["rows", "keys", "seen", "stride_split", "stride_places"])
def attend_runs_kernel(
    q_ptr, runs_ptr, places_ptr, k_ptr, v_ptr, state_ptr, seen_ptr,
    rows, keys, seen, scale,
    stride_qt, stride_qh, stride_head, stride_places, stride_plain, stride_token, stride_split, stride_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, HAS_SEEN: tl.constexpr,
    PLANE: tl.constexpr, FRESH: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the first `keys` keys to the state of every row; arguments as of `attend_kernel`.

    Where run r of a head lies is `places[head, r]`: ~n says packed run n, else it is plain, from token 128 n on of
    `k_ptr` and `v_ptr`. PLANE: runs end with plane A.
    """
    head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, member = row // GROUP, head * GROUP + row % GROUP
    dims = tl.arange(0, BLOCK_D)
    is_row, is_dim = row < rows, dims < HEAD_DIM
    wanted = is_row[:, None] & is_dim[None, :]
    q = tl.load(
        q_ptr + token[:, None] * stride_qt + member[:, None] * stride_qh + dims[None, :], mask=wanted, other=0.0
    )
    if WIDEN:
        q = q.to(tl.float32)
    state = state_ptr + split * stride_split + token.to(tl.int64) * stride_row + member * (HEAD_DIM + 2)
    top, total, acc = load_state(state, dims, is_row, wanted, FRESH, BLOCK_M, BLOCK_D)
    if HAS_SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
        keys = seen + (rows // GROUP - 1) if CAUSAL else seen
    limit = seen + token if CAUSAL else seen + token * 0

    runs = runs_ptr + head.to(tl.int64) * stride_head
    k_head, v_head = k_ptr + head.to(tl.int64) * stride_plain, v_ptr + head.to(tl.int64) * stride_plain
    for start in range(split * BLOCK_N, keys, tl.num_programs(2) * BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        is_key = index < keys
        place = tl.load(places_ptr + head * stride_places + start // 128)
        k, v = _load_tile(
            runs, place, start % 128, k_head, v_head, is_key, stride_token, HEAD_DIM, BLOCK_N, BLOCK_D, PLANE
        )
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(is_key[None, :] & (index[None, :] < limit[:, None]), logits, float("-inf"))
        weights, kept, top, total = add_logits(logits, top, total)
        rounded = weights.to(tl.bfloat16)
        if WIDEN:
            rounded = rounded.to(tl.float32)
        acc = acc * kept[:, None] + tl.dot(rounded, v, input_precision="ieee")
    store_state(state, dims, is_row, wanted, top, total, acc)


@triton.jit(do_not_specialize=["size", "runs_a_row", "stride_plain"])
def unpack_kernel(
    runs_ptr, places_ptr, k_ptr, v_ptr, rows_ptr, starts_ptr, keys_ptr, values_ptr,
    size, runs_a_row, stride_row, stride_plain, stride_token,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """Write `size` keys, and values, of each item, from its start in its row on, one behind the other.

    Grid: (items, spans of 32 tokens). Arguments as of `attend_runs_kernel`; a row is a layer's KV head.
    """
    item = tl.program_id(0).to(tl.int64)
    row, start = tl.load(rows_ptr + item), tl.load(starts_ptr + item)
    first = (start // 32 + tl.program_id(1)) * 32
    token = first + tl.arange(0, 32)
    is_own = (token >= start) & (token < start + size)
    if first < start + size:
        place = tl.load(places_ptr + row * runs_a_row + first // 128)
        plain = row * stride_plain
        k, v = _load_tile(
            runs_ptr + row * stride_row, place, (first % 128).to(tl.int32), k_ptr + plain, v_ptr + plain, is_own,
            stride_token, HEAD_DIM, 32, BLOCK_D, 0,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_D)
        to = (item * size + token - start)[:, None] * HEAD_DIM + dims[None, :]
        here = is_own[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(keys_ptr + to, k, mask=here)
        if HAS_VALUES:
            tl.store(values_ptr + to, v, mask=here)
