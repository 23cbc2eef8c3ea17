"""The kernels of packed_kv.py and pack_runs.py as torch operations, which have a launch each; as in ops.py."""

import torch
from torch import Tensor

from ...settings.kv_formats import PLANE_KV
from .ops import blocks_of_rows, library, register, tile

_MEMORY = "Tensor runs, Tensor places, Tensor keys, Tensor values"
library.define(
    f"attend_runs(Tensor q, {_MEMORY}, Tensor(a!) state, Tensor? length, int seen, bool causal, bool fresh) -> ()"
)
library.define(f"unpack_runs({_MEMORY}, Tensor rows, Tensor starts, Tensor(a!) own, Tensor(b!)? others) -> ()")
library.define("pack_runs(Tensor keys, Tensor values, Tensor(a!) runs, Tensor(b!) fits, int first, int ring) -> ()")


def attend_runs(
    q: Tensor,
    memory: tuple[Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    seen: int | Tensor,
    causal: bool = True,
    fresh: bool = True,
) -> None:
    """Add to states the first keys of packed runs and plain ones; one launch. The bits are those of `attend_pages`.

    Args:
        q: rotated queries `[tokens, heads, head_dim]` in bf16; head_dim is a multiple of 32.
        memory: runs `[kv_heads, runs, bytes]`, uint8, whole or ending with plane A; where each run of the sequence
            lies, `[kv_heads, runs]` in int32: ~n is packed run n, and n plain run n; keys and values of plain runs,
            `[kv_heads, tokens, head_dim]`. The last two axes of each are contiguous.
        state: as of `attend_pages`.
        seen: keys that the first query sees; a tensor of one integer in device memory for a recorded step.
        causal: each further query sees one more.
        fresh: the states are those of no keys yet.
    """
    length, seen = (seen, 0) if isinstance(seen, Tensor) else (None, seen)
    torch.ops.triforce.attend_runs(q, *memory, state, length, seen, causal, fresh)


def unpack_runs(
    memory: tuple[Tensor, Tensor, Tensor, Tensor], rows: Tensor, starts: Tensor, size: int, has_values: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return keys, and values, `[n, size, head_dim]` of rows `[n]` from positions `starts` `[n]` on, bit for bit.

    `memory` is as of `attend_runs`, of rows instead of heads.
    """
    keys = memory[2]
    own, others = (keys.new_empty((len(rows), size, keys.shape[2])) for _ in range(2))
    torch.ops.triforce.unpack_runs(*memory, rows, starts, own, others if has_values else None)
    return own, others if has_values else None


def pack_runs(keys: Tensor, values: Tensor, runs: Tensor, first: int, count: int, ring: int) -> Tensor:
    """Pack `count` runs of all rows to `runs` `[rows, runs, bytes]`, from `first` on; return what fits `[rows, count]`.

    A run that does not fit has too many numbers that are stored apart, and loses some. keys and values:
    `[rows, tokens, head_dim]`, contiguous but for the rows; run r is at r modulo `ring`.
    """
    fits = torch.empty((len(runs), count), dtype=torch.uint8, device=runs.device)
    torch.ops.triforce.pack_runs(keys, values, runs, fits, first, ring)
    return fits


def _width(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


def _attend_runs(
    q: Tensor,
    runs: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    length: Tensor | None,
    seen: int,
    causal: bool,
    fresh: bool,
) -> None:
    from . import packed_kv

    (tokens, heads, head_dim), kv_heads = q.shape, len(runs)
    plane = runs.shape[2] == PLANE_KV.run_bytes(head_dim)
    rows, block, width = blocks_of_rows(q, kv_heads)
    packed_kv.attend_runs_kernel[(kv_heads, -(-rows // block), len(state))](
        q, runs, places, keys, values, state, q if length is None else length,
        rows, seen + (tokens - 1) * causal, seen, head_dim**-0.5,
        q.stride(0), q.stride(1), runs.stride(0), places.stride(0), keys.stride(0), keys.stride(1),
        state.stride(0), state.stride(1),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, CAUSAL=causal, HAS_SEEN=length is not None, PLANE=plane,
        FRESH=fresh, WIDEN=q.device.type == "cpu", BLOCK_M=block, BLOCK_N=tile(width * q.element_size()), BLOCK_D=width,
        num_stages=2,
    )  # fmt: skip


def _unpack_runs(
    runs: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    starts: Tensor,
    own: Tensor,
    others: Tensor | None,
) -> None:
    from . import packed_kv

    items, size, head_dim = own.shape
    if not own.numel():
        return
    packed_kv.unpack_kernel[(items, (size + 62) // 32)](
        runs, places, keys, values, rows, starts, own, own if others is None else others,
        size, places.stride(0), runs.stride(0), keys.stride(0), keys.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=_width(head_dim), HAS_VALUES=others is not None,
    )  # fmt: skip


def _pack_runs(keys: Tensor, values: Tensor, runs: Tensor, fits: Tensor, first: int, ring: int) -> None:
    from . import pack_runs

    head_dim = keys.shape[2]
    pack_runs.pack_kernel[tuple(fits.shape)](
        keys, values, runs, fits, first, fits.shape[1], ring, runs.shape[1], keys.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=_width(head_dim), num_warps=4 if head_dim <= 64 else 8,
    )  # fmt: skip


register(attend_runs=_attend_runs, unpack_runs=_unpack_runs, pack_runs=_pack_runs)
