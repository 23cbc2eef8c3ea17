"""Launches of the kernels of rows: norms, gates, RoPE with storing, products with quantised weights."""

from typing import Any

import torch
from torch import Tensor

from ..device_weight import DeviceWeight
from .launch import block, operation

_GATE_BLOCK = 1024
_OUTPUTS_A_PROGRAM = 64
_LEAST_ROWS = 16  # of a matrix unit
_PROGRAMS_A_PROCESSOR = 8  # whose loads together hide the latency of memory
_LEAST_GROUPS = 8  # of a split: fewer are not worth the sums that are added afterwards
_OUTPUTS_TO_ADD = 256


@operation("y")
def norm_rows(x: Tensor, weight: Tensor, y: Tensor, epsilon: float) -> None:
    """Write the RMSNorm of `x` to `y`; see `rms_norm`."""
    from . import rows

    heads, width = x.shape[1] if x.dim() == 3 else 1, block(x.shape[-1])
    rows.norm_kernel[(len(x), heads)](
        x, weight, y, heads, x.stride(0), x.stride(1), epsilon,
        WIDTH=x.shape[-1], BLOCK=width, num_warps=min(max(width // 512, 1), 16),
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm over the last axis of `[tokens, heads, width]`, contiguous there, or of `[tokens, width]`."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    norm_rows(x, weight, y, epsilon)
    return y


@operation("y")
def gate_rows(x: Tensor, y: Tensor) -> None:
    """Write silu(gate) * up of rows `[gate, up]` to `y`; see `gated`."""
    from . import rows

    width = y.shape[1]
    rows.gate_kernel[(len(x), -(-width // _GATE_BLOCK))](x, y, width, x.stride(0), BLOCK=_GATE_BLOCK)


def gated(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[rows, width]` of rows `[gate, up]`, contiguous in the last axis."""
    y = x.new_empty((len(x), x.shape[1] // 2))
    gate_rows(x, y)
    return y


@operation("out", "keys", "values")
def rotate_and_store(
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
    """Write rotated queries to `out`, and store keys and values; see `append`."""
    from . import rows

    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    rows.append_kernel[(tokens, heads + kv_heads)](
        q, k, v, cos, sin, out, keys, values, q if positions is None else positions, start, stored,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0), keys.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, HAS_POSITIONS=positions is not None, BLOCK=block(head_dim // 2), num_warps=1,
    )  # fmt: skip


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
    rotate_and_store(q, k, v, *rows, out, keys, values, positions, start, stored)
    return out


@operation("y")
def multiply(
    x: Tensor, weight: list[Tensor | None], bits: int, first: int, bias: Tensor | None, y: Tensor, add: bool
) -> None:
    """Write products with the `operands` of a weight to `y` `[rows, outputs]`, or add them there.

    With `y` `[splits, rows, outputs]` its inputs are divided among programs: each part has a sum of its own.
    """
    from . import quantized

    pointers = _pointers(weight)
    rows, (groups, outputs, *_) = len(x), pointers[0].shape
    splits = len(y) if y.dim() == 3 else 1
    rows_a_program = min(64, max(_LEAST_ROWS, block(rows)))
    quantized.product_kernel[(-(-outputs // _OUTPUTS_A_PROGRAM), -(-rows // rows_a_program), splits)](
        x, *pointers, y if bias is None else bias, y,
        rows, outputs, groups, -(-groups // splits), x.stride(0), y.stride(-2), y.stride(0) if splits > 1 else 0,
        **constants(weight, bits, first), HAS_BIAS=bias is not None, ADD=add, WIDEN=x.device.type == "cpu",
        BLOCK_N=_OUTPUTS_A_PROGRAM, BLOCK_M=rows_a_program, num_stages=3,
    )  # fmt: skip


@operation("y")
def add_splits(sums: Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Write the sum over the splits `[splits, rows, outputs]`, and the bias, to `y`, or add it there."""
    from . import quantized

    splits, (rows, outputs) = len(sums), y.shape
    quantized.add_splits_kernel[(-(-outputs // _OUTPUTS_TO_ADD), rows)](
        sums, y if bias is None else bias, y, splits, outputs, sums.stride(0), sums.stride(1), y.stride(0),
        HAS_BIAS=bias is not None, ADD=add, BLOCK_N=_OUTPUTS_TO_ADD,
    )  # fmt: skip


@operation("y")
def write_dequantized(
    weight: list[Tensor | None], bits: int, first: int, ids: Tensor | None, start: int, y: Tensor
) -> None:
    """Write dequantised rows of the `operands` of a weight to `y` `[n, inputs]`: `ids` `[n]`, or those from `start`."""
    from . import quantized

    pointers = _pointers(weight)
    groups, outputs, *_ = pointers[0].shape
    quantized.dequantize_kernel[(-(-len(y) // _OUTPUTS_A_PROGRAM), groups)](
        *pointers, pointers[0] if ids is None else ids, y, start, len(y), outputs, y.stride(0),
        **constants(weight, bits, first), HAS_IDS=ids is not None, BLOCK_N=_OUTPUTS_A_PROGRAM,
    )  # fmt: skip


def product(x: Tensor, weight: DeviceWeight, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Write x W^T + bias to `y`, or add it to what is there.

    x `[rows, inputs]` and y `[rows, outputs]` may be parts of longer rows, of contiguous numbers; bias `[outputs]`.
    One launch, or two where the inputs are divided among programs.
    """
    outputs, splits = weight.shape[0], _useful_splits(x.device, weight)
    if splits == 1:
        multiply(x, *operands(weight), bias, y, add)
        return
    apart = -(-outputs // 16) * 16  # whose multiples the compiler takes for aligned, however many rows there are
    sums = torch.empty((splits, len(x), apart), dtype=torch.float32, device=x.device)
    multiply(x, *operands(weight), None, sums, False)
    add_splits(sums, bias, y, add)


def dequantize(weight: DeviceWeight, outputs: int | Tensor, y: Tensor) -> Tensor:
    """Write the weights of outputs, from a first one on or those of ids `[n]`, to `y` `[n, inputs]`; return `y`."""
    ids, start = (outputs, 0) if isinstance(outputs, Tensor) else (None, outputs)
    write_dequantized(*operands(weight), ids, start, y)
    return y


def operands(weight: DeviceWeight) -> tuple[list[Tensor | None], int, int]:
    """Return a weight's tensors in the order of the kernels' arguments, its bits and its first level."""
    tensors = [weight.codes, weight.high, weight.scales, weight.minima, weight.factors, weight.minimum_factors]
    return [*tensors, weight.levels], weight.format.bits, weight.format.levels[0] if weight.format.levels else 0


def constants(weight: list[Tensor | None], bits: int, first: int) -> dict[str, Any]:
    """Return the constants of the kernels for the `operands` of a weight."""
    _, _, _, minima, factors, _, levels = weight
    codes, _, scales, *_ = _pointers(weight)
    return {
        "BITS": bits,
        "FIRST": first,
        "HAS_TABLE": levels is not None,
        "NESTED": factors is not None,
        "IS_FLOAT": bits == 8 and first == 0,
        "HALVES": len(scales) == 2 * len(codes),
        "WIDE": max(1, len(codes) // len(scales)),
        "HAS_MINIMUM": minima is not None,
    }


def _pointers(weight: list[Tensor | None]) -> list[Tensor]:
    """Return a weight's tensors as the kernels take them; in place of absent ones, which are not read, the codes."""
    codes = weight[0]
    assert codes is not None
    return [codes if x is None else x for x in weight]


def _useful_splits(device: torch.device, weight: DeviceWeight) -> int:
    """Return into how many parts to divide the inputs, so that each processor of the GPU has work.

    Rows do not count, so that a row's result depends on nothing but itself.
    """
    outputs, inputs = weight.shape
    groups = inputs // 32
    if device.type != "cuda":
        return min(2, groups)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = _PROGRAMS_A_PROCESSOR * processors // -(-outputs // _OUTPUTS_A_PROGRAM)
    return max(1, min(wanted, groups // _LEAST_GROUPS))
