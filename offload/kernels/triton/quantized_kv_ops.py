"""The kernel of quantized_kv.py as a torch operation: it has a launch, and FakeTensorMode knows its shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...settings.kv_formats import KV_FORMATS
from .ops import _library, blocks_of_rows

_library.define(
    "attend_groups(Tensor q, Tensor groups, Tensor(a!) state, str kind, int first, int stop, bool fresh) -> ()"
)


def attend_groups(q: Tensor, groups: Tensor, state: Tensor, kind: str, first: int, stop: int, fresh: bool) -> None:
    """Add the keys of groups `first` to `stop` to the state of rotated queries `[tokens, heads, head_dim]`; one launch.

    Args:
        groups: quantised keys and values `[kv_heads, groups, bytes]`, uint8; those of a head are contiguous.
        state: as of `ops.attend_pages`.
        kind: their format.
    """
    torch.ops.triforce.attend_groups(q, groups, state, kind, first, stop, fresh)


def _attend_groups(q: Tensor, groups: Tensor, state: Tensor, kind: str, first: int, stop: int, fresh: bool) -> None:
    from . import quantized_kv

    (_, heads, head_dim), kv_heads, format = q.shape, len(groups), KV_FORMATS[kind]
    rows, block, width = blocks_of_rows(q, kv_heads)
    quantized_kv.attend_groups_kernel[(kv_heads, -(-rows // block), len(state))](
        q, groups, state, rows, first, stop, head_dim**-0.5,
        q.stride(0), q.stride(1), groups.stride(0), state.stride(0), state.stride(1),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BITS=format.bits, IS_FLOAT=format.is_float, FRESH=fresh,
        WIDEN=q.device.type == "cpu", BLOCK_M=block, BLOCK_D=width, num_stages=2,
    )  # fmt: skip


for _key in ("CUDA", "CPU"):  # on the CPU: Triton's interpreter
    _library.impl("attend_groups", _attend_groups, _key)
_library.impl("attend_groups", lambda *_: None, "Meta")
