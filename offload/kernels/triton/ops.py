"""The kernels of attention as torch operations: they have a launch each, and FakeTensorMode knows their shapes."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import PLAIN

_MOST_SPLITS = 64  # of the keys: more are not worth the states that are merged afterwards
_TILE_BYTES = 2**14  # of keys, and of values, that a program takes at once: the next tiles are on their way meanwhile
_KEYS = (16, 64)  # of a tile, at least and at most
_ROWS_A_PROGRAM = 32  # query rows, tokens times the group's heads, at most; see attend.py for 64, which spill registers
_LEAST_ROWS = 16  # of a matrix unit
_STATES_A_STEP = 16  # that are merged at once
# Programs that share a processor by compute capability: three stages of tiles take up to 78 KiB of its shared memory,
# which is 164 KiB (8.0), 228 KiB (9.0, 10.0), or 100 KiB.
_PROGRAMS_A_PROCESSOR = {(8, 0): 2, (8, 7): 2, (9, 0): 2, (10, 0): 2, (10, 3): 2}

library = torch.library.Library("triforce", "DEF")
library.define(
    "attend(Tensor q, Tensor keys, Tensor values, Tensor(a!) state, Tensor? table, Tensor? length, int count, int seen,"
    " bool causal, bool fresh, int layout, int chunk, int tail) -> ()"
)
library.define("observe(Tensor q, Tensor keys, Tensor lse, Tensor(a!) received, int seen) -> ()")
library.define("attend_groups(Tensor q, Tensor groups, Tensor(a!) state, int first, int stop, bool fresh) -> ()")
library.define("finish(Tensor state, Tensor(a!) out, Tensor(b!)? lse) -> ()")


def new_state(q: Tensor, splits: int) -> Tensor:
    """Return room for the states of rows `[tokens, heads, head_dim]`: `[splits, tokens, heads, 2 + head_dim]` in fp32.

    Uninitialised: the first call of `attend` over it is `fresh`.
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


def tile(row_bytes: int) -> int:
    """Return the keys that a program takes at once, by the bytes of one."""
    return min(max(_TILE_BYTES // row_bytes, _KEYS[0]), _KEYS[1])


def blocks_of_rows(q: Tensor, kv_heads: int) -> tuple[int, int, int]:
    """Return the query rows of a KV head, tokens times the group's heads, those of a program, and its dimensions."""
    tokens, heads, head_dim = q.shape
    rows = tokens * heads // kv_heads
    block = min(_ROWS_A_PROGRAM, max(_LEAST_ROWS, 1 << (rows - 1).bit_length()))
    return rows, block, 1 << (head_dim - 1).bit_length()


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    table: Tensor | None,
    length: Tensor | None,
    count: int,
    seen: int,
    causal: bool,
    fresh: bool,
    layout: int,
    chunk: int,
    tail: int,
) -> None:
    from . import attend

    (_, heads, head_dim), kv_heads = q.shape, len(keys)
    rows, block, width = blocks_of_rows(q, kv_heads)
    # Tiles of plain keys on their way: blocks come over a link, and numbers of 32 bits are for tests.
    stages = 3 if layout == PLAIN and q.element_size() == 2 else 2
    grid = (kv_heads, -(-rows // block), len(state))
    attend.attend_kernel[grid](
        q, keys, values, state, q if table is None else table, q if length is None else length,
        rows, count, seen, head_dim**-0.5,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), state.stride(0), state.stride(1),
        0 if table is None else table.stride(0), 0 if table is None else table.shape[1], tail,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, LAYOUT=layout, CAUSAL=causal, FRESH=fresh, CHUNK=chunk,
        HAS_SEEN=length is not None,
        WIDEN=q.device.type == "cpu",
        BLOCK_M=block, BLOCK_N=tile(width * q.element_size()), BLOCK_D=width, num_stages=stages,
    )  # fmt: skip


def _finish(state: Tensor, out: Tensor, lse: Tensor | None) -> None:
    from . import attend

    splits, tokens, heads, width = state.shape
    head_dim = width - 2
    attend.finish_kernel[(tokens * heads,)](
        state, out, out if lse is None else lse, splits, state.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=1 << (head_dim - 1).bit_length(), HAS_LSE=lse is not None, STATES=_STATES_A_STEP,
    )  # fmt: skip


def _observe(q: Tensor, keys: Tensor, lse: Tensor, received: Tensor, seen: int) -> None:
    from . import attend

    tokens, heads, head_dim = q.shape
    kv_heads, group = len(keys), heads // len(keys)
    count, width = seen + tokens - 1, 1 << (head_dim - 1).bit_length()
    keys_a_step = tile(width * q.element_size())
    attend.observe_kernel[(kv_heads, -(-count // keys_a_step))](
        q, keys, lse, received, tokens * group, count, seen, head_dim**-0.5,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), lse.stride(0), received.stride(0),
        GROUP=group, HEAD_DIM=head_dim, WIDEN=q.device.type == "cpu",
        BLOCK_M=_ROWS_A_PROGRAM, BLOCK_N=keys_a_step, BLOCK_D=width,
    )  # fmt: skip


def _attend_groups(q: Tensor, groups: Tensor, state: Tensor, first: int, stop: int, fresh: bool) -> None:
    from . import quantized_kv

    (_, heads, head_dim), kv_heads = q.shape, len(groups)
    rows, block, width = blocks_of_rows(q, kv_heads)
    quantized_kv.attend_groups_kernel[(kv_heads, -(-rows // block), len(state))](
        q, groups, state, rows, first, stop, head_dim**-0.5,
        q.stride(0), q.stride(1), groups.stride(0), state.stride(0), state.stride(1),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, FRESH=fresh,
        WIDEN=q.device.type == "cpu", BLOCK_M=block, BLOCK_D=width, num_stages=2,
    )  # fmt: skip


def register(**operations: Callable[..., None]) -> None:
    """Have operations, by name, run on a GPU, and on the CPU in Triton's interpreter."""
    for name, run in operations.items():
        for key in ("CUDA", "CPU"):
            library.impl(name, run, key)
        library.impl(name, lambda *_: None, "Meta")


register(attend=_attend, attend_groups=_attend_groups, finish=_finish, observe=_observe)


def attend_pages(
    q: Tensor, keys: Tensor, values: Tensor, state: Tensor, seen: int, causal: bool, fresh: bool, layout: int = PLAIN
) -> None:
    """Add the first `seen` keys to the state of rotated queries `[tokens, heads, head_dim]`.

    Args:
        keys, values: PLAIN: `[kv_heads, tokens, head_dim]`, of the same strides, contiguous in the last axis. BLOCKS:
            twice the native kernel's blocks `[kv_heads, blocks, 2 * 16 * head_dim]` in bf16.
        state: `[splits, tokens, heads, 2 + head_dim]`; `fresh` says that nothing is in it yet.
        causal: token t sees t keys more.
    """
    count = seen + (len(q) - 1 if causal else 0)
    torch.ops.triforce.attend(q, keys, values, state, None, None, count, seen, causal, fresh, layout, 0, 0)


def attend_growing(q: Tensor, keys: Tensor, values: Tensor, state: Tensor, seen: Tensor) -> None:
    """Begin states with the keys up to a length in device memory, causally; what a recorded step of fixed shape needs.

    Args:
        keys, values: `[kv_heads, capacity, head_dim]`.
        seen: keys that the first query sees, an integer tensor of one number.
    """
    torch.ops.triforce.attend(q, keys, values, state, None, seen, 0, 0, True, True, PLAIN, 0, 0)


def attend_table(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    state: Tensor,
    table: Tensor,
    chunk: int,
    tail: int,
    seen: int,
    causal: bool = True,
) -> None:
    """Begin states with the keys of selected chunks, then the tail's: causally to the queries' own, which end it.

    Args:
        keys, values: as in `attend_keys`, of the whole store.
        table: numbers of chunks of `chunk` tokens, `[kv_heads, slots]` in int32.
        tail: position of the tail's first token.
        seen: keys that the first query sees, of the chunks and the tail.
        causal: each further query sees one more.
    """
    count = seen + (len(q) - 1 if causal else 0)
    torch.ops.triforce.attend(q, keys, values, state, table, None, count, seen, causal, True, PLAIN, chunk, tail)


def attend_growing_table(
    q: Tensor, keys: Tensor, values: Tensor, state: Tensor, table: Tensor, chunk: int, lengths: Tensor
) -> None:
    """Do what `attend_table` does with lengths in device memory, as a recorded step of fixed shape needs.

    Args:
        table: numbers of chunks, `[kv_heads, at least slots]` in int32.
        lengths: `seen`, the number of slots that are used, and `tail`: integers `[3]`.
    """
    torch.ops.triforce.attend(q, keys, values, state, table, lengths, 0, 0, True, True, PLAIN, chunk, 0)


def attend_groups(q: Tensor, groups: Tensor, state: Tensor, first: int, stop: int, fresh: bool) -> None:
    """Add the keys of groups `first` to `stop` to the state of rotated queries `[tokens, heads, head_dim]`; one launch.

    Args:
        groups: quantised keys and values `[kv_heads, groups, bytes]`, uint8; those of a head are contiguous.
        state: as of `attend_pages`.
    """
    torch.ops.triforce.attend_groups(q, groups, state, first, stop, fresh)


def finish(state: Tensor, like: Tensor, lse: Tensor | None = None) -> Tensor:
    """Return the attention `[tokens, heads, head_dim]` that states stand for, in the dtype of `like`.

    `lse` `[tokens, heads]` in fp32, if given, is filled with the log-sum-exp.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    torch.ops.triforce.finish(state, out, lse)
    return out


def observe(q: Tensor, keys: Tensor, lse: Tensor, received: Tensor, seen: int) -> None:
    """Add the softmax weights of causal attention, which returned `lse`, to `received`.

    Args:
        q: rotated queries `[tokens, heads, head_dim]`, contiguous in the last axis.
        keys: `[kv_heads, at least seen + tokens - 1, head_dim]`, contiguous in the last axis.
        lse: `[tokens, heads]` in fp32, contiguous in the last axis.
        received: `[kv_heads, at least seen + tokens - 1]` in fp32, contiguous rows: sums over a KV head's queries.
        seen: keys that the first query sees.
    """
    torch.ops.triforce.observe(q, keys, lse, received, seen)
