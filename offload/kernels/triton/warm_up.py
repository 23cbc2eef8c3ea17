"""Runs every variant of the kernels that decoding launches once, over a few numbers, so that none compiles in mid-run.

What a variant depends on: head sizes, the type of numbers, blocks of 16 and of 32 rows, where keys lie, and whether
lengths are in device memory. Lengths are none of it.
"""

import warnings
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ...architecture.config import ModelShape
from ...errors import Degraded
from ...settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV, PLANE_KV
from .. import triton
from ..kv_groups import quantize_groups
from . import BLOCKS, ROWS
from .accumulate import (
    GroupAccumulator,
    attend_growing,
    attend_keys,
    attend_packed,
    attend_packed_before,
    attend_stored,
    attend_table,
    attend_table_before,
)
from .ops import attend_pages, new_state, useful_splits
from .packed_ops import attend_runs, pack_runs, unpack_runs
from .row_ops import append, gated, rms_norm

_KEYS = 128  # tokens of memory


@dataclass(frozen=True)
class Needs:
    """What a model's decoding launches.

    `kv` is the format of the full cache's keys and values; `chunk`: tokens of a chunk that is attended to by a table,
    or 0; `streams`: whether pages of the native kernel's blocks arrive; `planes`: whether plane A of packed pages is
    attended to alone; `records`: whether steps are recorded.
    """

    kv: str = BF16
    chunk: int = 0
    streams: bool = False
    planes: bool = False
    records: bool = True


def warm_up(shape: ModelShape, dtype: torch.dtype, device: torch.device, needs: Needs) -> None:
    """Compile the kernels of a model's layers that attend to all tokens, or load them from Triton's cache.

    Without effect where Triton does not attend. Warns if one cannot be compiled.
    """
    if not triton.serves(torch.empty((1, 1, shape.head_dim), dtype=dtype, device=device)):
        return
    try:
        with torch.inference_mode():
            _launch(shape, dtype, device, needs)
    except Exception as error:  # of the compiler or the driver
        warnings.warn(f"a kernel cannot be compiled ahead: {error}", Degraded, stacklevel=2)


def _launch(shape: ModelShape, dtype: torch.dtype, device: torch.device, needs: Needs) -> None:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    group = heads // kv_heads
    keys, values = (torch.zeros((kv_heads, _KEYS, dim), dtype=dtype, device=device) for _ in range(2))
    for tokens in sorted({1, min(ROWS, 16 // group + 1)}):  # of 16 and of 32 rows
        fused = torch.zeros((tokens, heads + 2 * kv_heads, dim), dtype=dtype, device=device)
        q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        angles = torch.zeros((tokens, 1, dim), dtype=dtype, device=device)
        positions = torch.arange(tokens, device=device)
        rotated = append(q, k, v, (angles, angles), keys, values, 0)
        _attend(rotated, keys, values, needs)
        if needs.records:
            append(q, k, v, (angles, angles), keys, values, positions)
            _attend_recorded(rotated, keys, values, positions[:1] + 1, needs)
    _rows(shape, dtype, device)


def _rows(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros((1, shape.hidden), dtype=dtype, device=device)
    rms_norm(x, x[0], 1e-5)
    rms_norm(x.new_zeros(1, 1, shape.head_dim), x.new_zeros(shape.head_dim), 1e-5)
    gated(x.expand(2, -1).reshape(1, -1))


def _attend(q: Tensor, keys: Tensor, values: Tensor, needs: Needs) -> None:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    attend_stored(q, keys, values)
    attend_stored(q, keys, values, lse)
    attend_keys(q, keys, values)
    if needs.chunk:
        table = torch.zeros((len(keys), 1), dtype=torch.int32, device=q.device)
        attend_table(q, keys, values, table, needs.chunk, (needs.chunk, 0))
        attend_table_before(q, keys, values, table, needs.chunk, (needs.chunk, 0))
    if needs.streams:
        blocks = torch.stack((keys, values), dim=1).view(len(keys), _KEYS // 16, -1)
        state = new_state(q, useful_splits(q.device, len(keys)))
        for is_fresh in (True, False):
            attend_pages(q, blocks, blocks, state, _KEYS, False, is_fresh, BLOCKS)
            attend_pages(q, keys, values, state, _KEYS - len(q), True, is_fresh)
    if KV_FORMATS[needs.kv] is PACKED_KV:
        memory = _packed(keys, values)
        attend_packed(q, memory, 1)
        attend_packed_before(q, memory, 1)
        if needs.streams:
            state = new_state(q, useful_splits(q.device, len(keys)))
            attend_runs(q, memory, state, 1, causal=False, fresh=False)
            if needs.planes:
                plane = memory[0][..., : PLANE_KV.run_bytes(q.shape[2])]
                attend_runs(q, (plane, *memory[1:]), state, 1, causal=False)
    elif KV_FORMATS[needs.kv] is not PLAIN_KV:
        _attend_groups(q, keys, values)


def _attend_groups(q: Tensor, keys: Tensor, values: Tensor) -> None:
    groups = quantize_groups(keys.unflatten(1, (-1, 32)), values.unflatten(1, (-1, 32)))
    table = torch.zeros((len(keys), 1), dtype=torch.int32, device=q.device)
    for sink, is_after in product((None, (table, 32)), (True, False)):
        result = GroupAccumulator(q, len(keys))
        if is_after:
            result.attend_exact(slice(0, len(q)), keys, values, sink, 32, 0)
        result.attend_groups(slice(0, len(q)), groups, 0, 1)
        result.partial()


def _packed(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory of a packed run, which has been packed and unpacked."""
    heads, size = len(keys), KV_FORMATS["packed"].run_bytes(keys.shape[2])
    runs = torch.zeros((heads, 1, size), dtype=torch.uint8, device=keys.device)
    pack_runs(keys, values, runs, 0, 1, 1)
    memory = runs, torch.full((heads, 1), -1, dtype=torch.int32, device=keys.device), keys, values
    rows = torch.arange(heads, device=keys.device)
    for has_values in (True, False):
        unpack_runs(memory, rows, rows * 0, 16, has_values)
    return memory


def _attend_recorded(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, needs: Needs) -> None:
    attend_growing(q, keys, values, seen)
    if needs.chunk:
        table = torch.zeros((len(keys), 1), dtype=torch.int32, device=q.device)
        lengths = torch.ones(3, dtype=torch.long, device=q.device)
        attend_table(q, keys, values, table, needs.chunk, lengths)
