"""The Triton kernels: attention over keys and values as they lie, with a running state, and what finishes it.

`observe_kernel` adds up the weights of attention that has been computed.

The state of a row is (m, l, acc): the largest logit so far, the sum of exp(logit - m), and the same sum over the values
(the online softmax of FlashAttention, arXiv 2205.14135). Keys are divided into splits (Flash-Decoding), each with a
state of its own, which is carried from one call to the next; `finish_kernel` merges them once at the end.

The arithmetic of a row does not depend on the rows beside it: splits follow from the keys alone, and blocks of 16 and
of 32 rows are divided among warps in the same way. Blocks of 64 would not be from compute capability 9.0 on, where
matrix units take 64 rows at once: a sum over keys then has another order.

No kernel is specialised to a length (1, or a multiple of 16): each length's class would be compiled in mid-run.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl


@triton.jit
def _offsets(tokens, dims, stride_token, HEAD_DIM: tl.constexpr, LAYOUT: tl.constexpr, IS_VALUE: tl.constexpr):
    """Return where the numbers of tokens `[n]` lie behind their head's first one, `[n, d]`.

    PLAIN: a token's numbers side by side, tokens `stride_token` apart. BLOCKS: the native kernel's blocks of 16 tokens
    in 16 bits (types.h), keys in pairs of dimensions, then values in pairs of tokens.
    """
    if LAYOUT == 0:
        return tokens[:, None].to(tl.int64) * stride_token + dims[None, :]
    block = (tokens // 16).to(tl.int64)[:, None] * (32 * HEAD_DIM)
    inner = (tokens % 16)[:, None]
    column = dims[None, :]
    if IS_VALUE:
        return block + 16 * HEAD_DIM + (inner // 2) * (2 * HEAD_DIM) + column * 2 + inner % 2
    return block + (column // 2) * 32 + inner * 2 + column % 2


@triton.jit
def load_state(
    state, dims, is_row, wanted, FRESH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the state (m, l, acc) of rows, which lies at `state` `[rows]`; if FRESH, that of no key."""
    if FRESH:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    else:
        top = tl.load(state, mask=is_row, other=float("-inf"))
        total = tl.load(state + 1, mask=is_row, other=0.0)
        acc = tl.load(state[:, None] + 2 + dims[None, :], mask=wanted, other=0.0)
    return top, total, acc


@triton.jit
def store_state(state, dims, is_row, wanted, top, total, acc):
    tl.store(state, top, mask=is_row)
    tl.store(state + 1, total, mask=is_row)
    tl.store(state[:, None] + 2 + dims[None, :], acc, mask=wanted)


@triton.jit
def add_logits(logits, top, total):
    """Return exp(logit - m) of some keys more `[rows, n]`, the factor of what was added up before, and the new m, l."""
    highest = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen no key yet
    weights = tl.exp(logits - base[:, None])
    kept = tl.exp(top - base)
    return weights, kept, highest, total * kept + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["rows", "keys", "seen", "stride_split", "stride_table", "slots", "tail"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, table_ptr, seen_ptr,
    rows, keys, seen, scale,
    stride_qt, stride_qh, stride_head, stride_token, stride_split, stride_row, stride_table,
    slots, tail,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, FRESH: tl.constexpr,
    HAS_SEEN: tl.constexpr, CHUNK: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the first `keys` keys to the state of every row.

    Grid: (kv_heads, blocks of rows, splits). `rows` are tokens times the group's heads; token t sees `seen` keys, t
    more if CAUSAL. With a CHUNK the keys are those of a table's chunks `[kv_heads, slots]`, then those from `tail` on.
    HAS_SEEN: `seen` is read from memory and `keys` follow from it, so that a recorded launch can be repeated; with a
    CHUNK, `slots` and `tail` are read behind it.
    WIDEN multiplies in fp32, for the interpreter, which cannot multiply bf16.
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
        if CHUNK > 0:
            slots = tl.load(seen_ptr + 1).to(tl.int32)
            tail = tl.load(seen_ptr + 2).to(tl.int32)
    limit = seen + token if CAUSAL else seen + token * 0
    k_head, v_head = k_ptr + head.to(tl.int64) * stride_head, v_ptr + head.to(tl.int64) * stride_head
    # Split by stripes of BLOCK_N keys: which split has a key does not depend on how many there are.
    for start in range(split * BLOCK_N, keys, tl.num_programs(2) * BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        is_key = index < keys
        position = index
        if CHUNK > 0:
            slot = index // CHUNK
            chosen = tl.load(table_ptr + head * stride_table + slot, mask=is_key & (slot < slots), other=0)
            position = tl.where(slot < slots, chosen.to(tl.int32) * CHUNK + index % CHUNK, tail + index - slots * CHUNK)
        here = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_head + _offsets(position, dims, stride_token, HEAD_DIM, LAYOUT, False), mask=here, other=0.0)
        v = tl.load(v_head + _offsets(position, dims, stride_token, HEAD_DIM, LAYOUT, True), mask=here, other=0.0)
        weight_type = v.dtype
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(is_key[None, :] & (index[None, :] < limit[:, None]), logits, float("-inf"))
        weights, kept, top, total = add_logits(logits, top, total)
        rounded = weights.to(weight_type)
        if WIDEN:
            rounded = rounded.to(tl.float32)
        acc = acc * kept[:, None] + tl.dot(rounded, v, input_precision="ieee")
    store_state(state, dims, is_row, wanted, top, total, acc)


@triton.jit(do_not_specialize=["splits", "stride_split"])
def finish_kernel(
    state_ptr, out_ptr, lse_ptr, splits, stride_split,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Merge the splits' states of a row, STATES at a time: its output and its log-sum-exp. Grid: tokens * heads."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    top, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, STATES):
        split = start + tl.arange(0, STATES)
        is_split = split < splits
        states = state_ptr + split.to(tl.int64) * stride_split + row * (HEAD_DIM + 2)
        tops = tl.load(states, mask=is_split, other=float("-inf"))
        sums = tl.load(states + 1, mask=is_split, other=0.0)
        accs = tl.load(states[:, None] + 2 + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0)
        highest = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        kept, weights = tl.exp(top - base), tl.exp(tops - base)
        total = total * kept + tl.sum(sums * weights, 0)
        acc = acc * kept + tl.sum(accs * weights[:, None], 0)
        top = highest
    out = acc / total
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=is_dim)
    if HAS_LSE:
        tl.store(lse_ptr + row, top + tl.log(total))


@triton.jit(do_not_specialize=["rows", "keys", "seen", "stride_received"])
def observe_kernel(
    q_ptr, k_ptr, lse_ptr, received_ptr, rows, keys, seen, scale,
    stride_qt, stride_qh, stride_head, stride_token, stride_lse, stride_received,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to each key the softmax weights of all rows that see it: exp(logit - log-sum-exp). Plain keys, causally.

    Grid: (kv_heads, blocks of keys); a key's sum is made by one program, in the order of the rows. See `attend_kernel`.
    """
    head = tl.program_id(0)
    index = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    is_key, is_dim = index < keys, dims < HEAD_DIM
    here = is_key[:, None] & is_dim[None, :]
    k_head = k_ptr + head.to(tl.int64) * stride_head
    k = tl.load(k_head + _offsets(index, dims, stride_token, HEAD_DIM, 0, False), mask=here, other=0.0)
    if WIDEN:
        k = k.to(tl.float32)
    received = received_ptr + head.to(tl.int64) * stride_received + index
    total = tl.load(received, mask=is_key, other=0.0)
    for start in range(0, rows, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        token, member = row // GROUP, head * GROUP + row % GROUP
        is_row = row < rows
        q = tl.load(
            q_ptr + token[:, None] * stride_qt + member[:, None] * stride_qh + dims[None, :],
            mask=is_row[:, None] & is_dim[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            q = q.to(tl.float32)
        lse = tl.load(lse_ptr + token * stride_lse + member, mask=is_row, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        sees = is_row[:, None] & is_key[None, :] & (index[None, :] < seen + token[:, None])
        total += tl.sum(tl.where(sees, tl.exp(logits - lse[:, None]), 0.0), 0)
    tl.store(received, total, mask=is_key)
