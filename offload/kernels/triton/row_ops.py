"""The kernels of rows.py as torch operations, which have a launch each; as in ops.py."""

import torch
from torch import Tensor

from .ops import library, register

_GATE_BLOCK = 1024

library.define("rms_norm(Tensor x, Tensor weight, Tensor(a!) y, float epsilon) -> ()")
library.define("gate(Tensor x, Tensor(a!) y) -> ()")
library.define(
    "append(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) out, Tensor(b!) keys, Tensor(c!) values,"
    " Tensor? positions, int start, int stored) -> ()"
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm over the last axis of `[tokens, heads, width]`, contiguous there, or of `[tokens, width]`."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ops.triforce.rms_norm(x, weight, y, epsilon)
    return y


def gated(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[rows, width]` of rows `[gate, up]`, contiguous in the last axis."""
    y = x.new_empty((len(x), x.shape[1] // 2))
    torch.ops.triforce.gate(x, y)
    return y


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    position: int | Tensor,
    stored: int = 0,
) -> Tensor:
    """Return rotated queries, contiguous, and store keys and values behind the first `stored`; one launch.

    Args:
        q, k, v: `[tokens, heads, head_dim]`, contiguous in the last axis.
        rows: cos and sin, `[tokens, 1, head_dim]`.
        keys, values: a layer's memory `[kv_heads, capacity, head_dim]`, of the same strides, contiguous but for heads.
        position: of the first token; or of all of them, in device memory, for a recorded step.
    """
    positions, start = (position, 0) if isinstance(position, Tensor) else (None, position)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    torch.ops.triforce.append(q, k, v, *rows, out, keys, values, positions, start, stored)
    return out


def _block(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _rms_norm(x: Tensor, weight: Tensor, y: Tensor, epsilon: float) -> None:
    from . import rows

    heads = x.shape[1] if x.dim() == 3 else 1
    block = _block(x.shape[-1])
    rows.norm_kernel[(len(x), heads)](
        x, weight, y, heads, x.stride(0), x.stride(1), epsilon,
        WIDTH=x.shape[-1], BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


def _gate(x: Tensor, y: Tensor) -> None:
    from . import rows

    width = y.shape[1]
    rows.gate_kernel[(len(x), -(-width // _GATE_BLOCK))](x, y, width, x.stride(0), BLOCK=_GATE_BLOCK)


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    start: int,
    stored: int,
) -> None:
    from . import rows

    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    rows.append_kernel[(tokens, heads + kv_heads)](
        q, k, v, cos, sin, out, keys, values, q if positions is None else positions, start, stored,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0), keys.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, HAS_POSITIONS=positions is not None,
        BLOCK=_block(head_dim // 2), num_warps=1,
    )  # fmt: skip


register(rms_norm=_rms_norm, gate=_gate, append=_append)
