"""Launches of the kernels of attention and of packing keys and values, each an operation of torch."""

import torch
from torch import Tensor

from ...settings.kv_formats import PLANE_KV
from . import PLAIN
from .launch import block, operation

_MOST_SPLITS = 64  # of the keys: more are not worth the states that are merged afterwards
_TILE_BYTES = 2**14  # of keys, and of values, that a program takes at once: the next tiles are on their way meanwhile
_KEYS = (16, 64)  # of a tile, at least and at most
_ROWS_A_PROGRAM = 32  # query rows, tokens times the group's heads, at most; see attend.py for 64, which spill registers
_LEAST_ROWS = 16  # of a matrix unit
_STATES_A_STEP = 16  # that are merged at once
# Programs that share a processor by compute capability: three stages of tiles take up to 78 KiB of its shared memory,
# which is 164 KiB (8.0), 228 KiB (9.0, 10.0), or 100 KiB.
_PROGRAMS_A_PROCESSOR = {(8, 0): 2, (8, 7): 2, (9, 0): 2, (10, 0): 2, (10, 3): 2}

# Packed memory: runs `[kv_heads, runs, bytes]`, uint8, whole or ending with plane A; where each run of the sequence
# lies, `[kv_heads, runs]` in int32: ~n is packed run n, and n plain run n; keys and values of plain runs,
# `[kv_heads, tokens, head_dim]`. The last two axes of each are contiguous.
PackedMemory = tuple[Tensor, Tensor, Tensor, Tensor]


def new_state(q: Tensor, splits: int) -> Tensor:
    """Return room for the states of rows `[tokens, heads, head_dim]`: `[splits, tokens, heads, 2 + head_dim]` in fp32.

    Uninitialised: the first launch over it is `fresh`.
    """
    tokens, heads, head_dim = q.shape
    return torch.empty((splits, tokens, heads, 2 + head_dim), dtype=torch.float32, device=q.device)


def useful_splits(device: torch.device, kv_heads: int) -> int:
    """Return into how many parts to divide keys, so that each processor of the GPU has work.

    Rows and keys do not count, so that a row's result depends on nothing but the keys that it sees.
    """
    if device.type != "cuda":
        return 2
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    programs *= _PROGRAMS_A_PROCESSOR.get(torch.cuda.get_device_capability(device), 1)
    return max(1, min(programs // kv_heads, _MOST_SPLITS))


def _tile(q: Tensor) -> int:
    """Return the keys that a program takes at once."""
    return min(max(_TILE_BYTES // (block(q.shape[2]) * q.element_size()), _KEYS[0]), _KEYS[1])


def _rows_of(q: Tensor, kv_heads: int) -> tuple[int, int]:
    """Return the query rows of a KV head, tokens times the group's heads, and those of a program."""
    rows = q.shape[0] * q.shape[1] // kv_heads
    return rows, min(_ROWS_A_PROGRAM, max(_LEAST_ROWS, block(rows)))


@operation("state")
def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    seen: int,
    causal: bool = True,
    fresh: bool = True,
    layout: int = PLAIN,
    table: Tensor | None = None,
    chunk: int = 0,
    tail: int = 0,
    lengths: Tensor | None = None,
) -> None:
    """Add keys to the states of rotated queries `[tokens, heads, head_dim]`: the first ones, or those of a table.

    Args:
        keys, values: PLAIN: `[kv_heads, tokens, head_dim]`, of the same strides, contiguous in the last axis. BLOCKS:
            twice the native kernel's blocks `[kv_heads, blocks, 2 * 16 * head_dim]` in bf16.
        state: `[splits, tokens, heads, 2 + head_dim]`; `fresh` says that nothing is in it yet.
        seen: keys that the first query sees.
        causal: each further query sees one more.
        table: numbers of chunks of `chunk` tokens, `[kv_heads, slots]` in int32; the keys are those of the chunks, and
            then those from position `tail` on.
        lengths: integers in device memory, as a recorded step of fixed shape needs: `seen`, and with a table the
            number of slots that are used, and `tail`. The arguments of these names are not read then.
    """
    from . import attend as kernels

    (tokens, heads, head_dim), kv_heads = q.shape, len(keys)
    rows, rows_a_program = _rows_of(q, kv_heads)
    # Tiles of plain keys on their way: blocks come over a link, and numbers of 32 bits are for tests.
    stages = 3 if layout == PLAIN and q.element_size() == 2 else 2
    kernels.attend_kernel[(kv_heads, -(-rows // rows_a_program), len(state))](
        q, keys, values, state, q if table is None else table, q if lengths is None else lengths,
        rows, seen + (tokens - 1) * causal, seen, head_dim**-0.5,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), state.stride(0), state.stride(1),
        0 if table is None else table.stride(0), 0 if table is None else table.shape[1], tail,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, LAYOUT=layout, CAUSAL=causal, FRESH=fresh, CHUNK=chunk,
        HAS_SEEN=lengths is not None, WIDEN=q.device.type == "cpu",
        BLOCK_M=rows_a_program, BLOCK_N=_tile(q), BLOCK_D=block(head_dim), num_stages=stages,
    )  # fmt: skip


@operation("state")
def attend_groups(q: Tensor, groups: Tensor, state: Tensor, stop: int, fresh: bool) -> None:
    """Add the keys of the first `stop` groups to the states of rotated queries `[tokens, heads, head_dim]`.

    Args:
        groups: quantised keys and values `[kv_heads, groups, bytes]`, uint8; those of a head are contiguous.
        state, fresh: as of `attend`.
    """
    from . import quantized_kv

    (_, heads, head_dim), kv_heads = q.shape, len(groups)
    rows, rows_a_program = _rows_of(q, kv_heads)
    quantized_kv.attend_groups_kernel[(kv_heads, -(-rows // rows_a_program), len(state))](
        q, groups, state, rows, stop, head_dim**-0.5,
        q.stride(0), q.stride(1), groups.stride(0), state.stride(0), state.stride(1),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, FRESH=fresh,
        WIDEN=q.device.type == "cpu", BLOCK_M=rows_a_program, BLOCK_D=block(head_dim), num_stages=2,
    )  # fmt: skip


@operation("state")
def attend_runs(
    q: Tensor,
    runs: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    seen: int,
    causal: bool = True,
    fresh: bool = True,
    length: Tensor | None = None,
) -> None:
    """Add the first keys of packed runs and plain ones to states. The bits are those of `attend`.

    Args:
        q: rotated queries `[tokens, heads, head_dim]` in bf16; head_dim is a multiple of 32.
        runs, places, keys, values: see `PackedMemory`.
        state, seen, causal, fresh: as of `attend`.
        length: `seen` in device memory, for a recorded step.
    """
    from . import packed_kv

    (tokens, heads, head_dim), kv_heads = q.shape, len(runs)
    rows, rows_a_program = _rows_of(q, kv_heads)
    packed_kv.attend_runs_kernel[(kv_heads, -(-rows // rows_a_program), len(state))](
        q, runs, places, keys, values, state, q if length is None else length,
        rows, seen + (tokens - 1) * causal, seen, head_dim**-0.5,
        q.stride(0), q.stride(1), runs.stride(0), places.stride(0), keys.stride(0), keys.stride(1),
        state.stride(0), state.stride(1),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, CAUSAL=causal, HAS_SEEN=length is not None,
        PLANE=runs.shape[2] == PLANE_KV.run_bytes(head_dim), FRESH=fresh, WIDEN=q.device.type == "cpu",
        BLOCK_M=rows_a_program, BLOCK_N=_tile(q), BLOCK_D=block(head_dim), num_stages=2,
    )  # fmt: skip


@operation("out", "lse")
def finish(state: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Write the attention that states stand for to `out`; see `finished`."""
    from . import attend as kernels

    splits, tokens, heads, width = state.shape
    kernels.finish_kernel[(tokens * heads,)](
        state, out, out if lse is None else lse, splits, state.stride(0),
        HEAD_DIM=width - 2, BLOCK_D=block(width - 2), HAS_LSE=lse is not None, STATES=_STATES_A_STEP,
    )  # fmt: skip


def finished(state: Tensor, like: Tensor, lse: Tensor | None = None) -> Tensor:
    """Return the attention `[tokens, heads, head_dim]` that states stand for, in the dtype of `like`.

    `lse` `[tokens, heads]` in fp32, if given, is filled with the log-sum-exp.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    finish(state, out, lse)
    return out


@operation("received")
def observe(q: Tensor, keys: Tensor, lse: Tensor, received: Tensor) -> None:
    """Add the softmax weights of causal attention, whose last keys are the queries' own, to `received`.

    Args:
        q: rotated queries `[tokens, heads, head_dim]`, contiguous in the last axis; any number of tokens.
        keys: `[kv_heads, keys, head_dim]`, contiguous in the last axis.
        lse: `[tokens, heads]` in fp32, contiguous in the last axis: the log-sum-exp of that attention.
        received: `[kv_heads, at least keys]` in fp32, contiguous rows: sums over a KV head's queries.
    """
    from . import attend as kernels

    (tokens, heads, head_dim), (kv_heads, count, _) = q.shape, keys.shape
    keys_a_step, group = _tile(q), heads // kv_heads
    kernels.observe_kernel[(kv_heads, -(-count // keys_a_step))](
        q, keys, lse, received, tokens * group, count, count - tokens + 1, head_dim**-0.5,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), lse.stride(0), received.stride(0),
        GROUP=group, HEAD_DIM=head_dim, WIDEN=q.device.type == "cpu",
        BLOCK_M=_ROWS_A_PROGRAM, BLOCK_N=keys_a_step, BLOCK_D=block(head_dim),
    )  # fmt: skip


@operation("own", "others")
def write_unpacked(
    runs: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    starts: Tensor,
    own: Tensor,
    others: Tensor | None,
) -> None:
    """Write keys to `own`, and values to `others`, `[n, size, head_dim]`; see `unpack_runs`."""
    from . import packed_kv

    items, size, head_dim = own.shape
    if not own.numel():
        return
    packed_kv.unpack_kernel[(items, (size + 62) // 32)](
        runs, places, keys, values, rows, starts, own, own if others is None else others,
        size, places.stride(0), runs.stride(0), keys.stride(0), keys.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=block(head_dim), HAS_VALUES=others is not None,
    )  # fmt: skip


def unpack_runs(
    memory: PackedMemory, rows: Tensor, starts: Tensor, size: int, has_values: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return keys, and values, `[n, size, head_dim]` of rows `[n]` from positions `starts` `[n]` on, bit for bit.

    `memory` is of rows instead of heads.
    """
    keys = memory[2]
    own, others = (keys.new_empty((len(rows), size, keys.shape[2])) for _ in range(2))
    write_unpacked(*memory, rows, starts, own, others if has_values else None)
    return own, others if has_values else None


@operation("runs", "fits")
def write_packed(keys: Tensor, values: Tensor, runs: Tensor, fits: Tensor, first: int, ring: int) -> None:
    """Pack runs, and set `fits` `[rows, count]`, uint8; see `pack_runs`."""
    from . import pack_runs as kernels

    head_dim = keys.shape[2]
    kernels.pack_kernel[tuple(fits.shape)](
        keys, values, runs, fits, first, fits.shape[1], ring, runs.shape[1], keys.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=block(head_dim), num_warps=4 if head_dim <= 64 else 8,
    )  # fmt: skip


def pack_runs(keys: Tensor, values: Tensor, runs: Tensor, first: int, count: int, ring: int) -> Tensor:
    """Pack `count` runs of all rows to `runs` `[rows, runs, bytes]`, from `first` on; return what fits `[rows, count]`.

    A run that does not fit has too many numbers that are stored apart, and loses some. keys and values:
    `[rows, tokens, head_dim]`, contiguous but for the rows; run r is at r modulo `ring`.
    """
    fits = torch.empty((len(runs), count), dtype=torch.uint8, device=runs.device)
    write_packed(keys, values, runs, fits, first, ring)
    return fits
