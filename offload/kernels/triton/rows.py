"""The Triton kernels of a layer beside its linears and attention: RMSNorm, RoPE with storing, and the gate of an MLP.

Each rounds where torch's operations round, so that results differ in the order of a sum at most.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "stride_token", "stride_head"])
def norm_kernel(
    x_ptr, weight_ptr, y_ptr, heads, stride_token, stride_head, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the RMSNorm of each head of each token, one behind the other. Grid: (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_token + head * stride_head + column, mask=column < WIDTH, other=0.0)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    y = y_ptr + (token * heads + head) * WIDTH + column
    tl.store(y, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["width", "stride_x"])
def gate_kernel(x_ptr, y_ptr, width, stride_x, BLOCK: tl.constexpr):
    """Write silu(gate) * up of rows `[gate, up]`. Grid: (rows, blocks)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = x_ptr + row * stride_x + column
    gate = tl.load(x, mask=column < width, other=0.0)
    up = tl.load(x + width, mask=column < width, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    gate = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * width + column, (gate * up).to(y_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _turn(x, other, cos_ptr, sin_ptr, y_ptr, is_own):
    """Write x * cos + other * sin, of which products are rounded before they are added."""
    kind: tl.constexpr = y_ptr.dtype.element_ty
    cos, sin = tl.load(cos_ptr, mask=is_own).to(tl.float32), tl.load(sin_ptr, mask=is_own).to(tl.float32)
    kept, turned = (x * cos).to(kind), (other * sin).to(kind)
    tl.store(y_ptr, (kept.to(tl.float32) + turned.to(tl.float32)).to(kind), mask=is_own)


@triton.jit
def _rotate(x_ptr, y_ptr, cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Write a head rotated by the angles of its token; pairs are halves, as in Llama."""
    column = tl.arange(0, BLOCK)
    is_own = column < HALF
    low = tl.load(x_ptr + column, mask=is_own).to(tl.float32)
    high = tl.load(x_ptr + HALF + column, mask=is_own).to(tl.float32)
    _turn(low, -high, cos_ptr + column, sin_ptr + column, y_ptr + column, is_own)
    second = HALF + column
    _turn(high, low, cos_ptr + second, sin_ptr + second, y_ptr + second, is_own)


@triton.jit(
    do_not_specialize=["start", "stored", "stride_q", "stride_k", "stride_v", "stride_head", "stride_cos", "stride_qh"]
)
def append_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, keys_ptr, values_ptr, positions_ptr,
    start, stored, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_cos, stride_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rotated queries one behind the other, and store rotated keys, and values, at their positions.

    Grid: (tokens, HEADS + KV_HEADS). Of the first `stored` tokens only queries are rotated. Positions are from `start`
    on, or read where HAS_POSITIONS.
    """
    token, part = tl.program_id(0), tl.program_id(1)
    cos, sin = cos_ptr + token * stride_cos, sin_ptr + token * stride_cos
    wide = token.to(tl.int64)
    if part < HEADS:
        out = out_ptr + (wide * HEADS + part) * HEAD_DIM
        _rotate(q_ptr + wide * stride_q + part * stride_qh, out, cos, sin, HEAD_DIM // 2, BLOCK)
    elif token >= stored:
        head = part - HEADS
        position = tl.load(positions_ptr + token) if HAS_POSITIONS else (start + token).to(tl.int64)
        to = head.to(tl.int64) * stride_head + position * HEAD_DIM
        _rotate(k_ptr + wide * stride_k + head * stride_kh, keys_ptr + to, cos, sin, HEAD_DIM // 2, BLOCK)
        column = tl.arange(0, 2 * BLOCK)
        v = tl.load(v_ptr + wide * stride_v + head * stride_vh + column, mask=column < HEAD_DIM)
        tl.store(values_ptr + to + column, v, mask=column < HEAD_DIM)
