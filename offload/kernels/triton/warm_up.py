"""Launches every variant of the kernels that decoding launches once, over a few numbers, so that none compiles later.

A variant depends on head sizes, the type of numbers, blocks of 16 and of 32 rows, where keys lie, and whether lengths
are in device memory; it does not depend on lengths.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ...architecture.config import ModelShape
from ...errors import Degraded
from ...settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV, PLANE_KV
from .. import triton
from ..kv_groups import quantize_groups
from . import BLOCKS, ROWS, accumulate
from .ops import PackedMemory, attend, attend_runs, new_state, pack_runs, unpack_runs, useful_splits
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
    keys, values = (torch.zeros((kv_heads, _KEYS, dim), dtype=dtype, device=device) for _ in range(2))
    for tokens in sorted({1, min(ROWS, 16 * kv_heads // heads + 1)}):  # of 16 and of 32 rows
        fused = torch.zeros((tokens, heads + 2 * kv_heads, dim), dtype=dtype, device=device)
        q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        angles = torch.zeros((tokens, 1, dim), dtype=dtype, device=device)
        rotated = append(q, k, v, (angles, angles), keys, values, 0)
        _attend_plain(rotated, keys, values, needs)
        if needs.records:
            append(q, k, v, (angles, angles), keys, values, torch.arange(tokens, device=device))
        if KV_FORMATS[needs.kv] is PACKED_KV:
            _attend_packed(rotated, keys, values, needs)
        elif KV_FORMATS[needs.kv] is not PLAIN_KV:
            _attend_groups(rotated, keys, values)
    x = torch.zeros((1, shape.hidden), dtype=dtype, device=device)
    rms_norm(x, x[0], 1e-5)
    rms_norm(x.new_zeros(1, 1, dim), x.new_zeros(dim), 1e-5)
    gated(x.expand(2, -1).reshape(1, -1))


def _attend_plain(q: Tensor, keys: Tensor, values: Tensor, needs: Needs) -> None:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    lengths = torch.ones(3, dtype=torch.long, device=q.device)
    table = torch.zeros((len(keys), 1), dtype=torch.int32, device=q.device)
    accumulate.attend_stored(q, keys, values)
    accumulate.attend_stored(q, keys, values, lse)
    accumulate.attend_keys(q, keys, values)
    if needs.records:
        accumulate.attend_growing(q, keys, values, lengths[:1])
    if needs.chunk:
        accumulate.attend_table(q, keys, values, table, needs.chunk, (needs.chunk, 0))
        accumulate.attend_table_before(q, keys, values, table, needs.chunk, (needs.chunk, 0))
        if needs.records:
            accumulate.attend_table(q, keys, values, table, needs.chunk, lengths)
    if needs.streams:
        blocks = torch.stack((keys, values), dim=1).view(len(keys), _KEYS // 16, -1)
        state = new_state(q, useful_splits(q.device, len(keys)))
        for is_fresh in (True, False):
            attend(q, blocks, blocks, state, _KEYS, False, is_fresh, BLOCKS)
            attend(q, keys, values, state, _KEYS - len(q), True, is_fresh)


def _attend_packed(q: Tensor, keys: Tensor, values: Tensor, needs: Needs) -> None:
    memory = _packed(keys, values)
    accumulate.attend_packed(q, memory, 1)
    accumulate.attend_packed_before(q, memory, 1)
    if needs.streams:
        state = new_state(q, useful_splits(q.device, len(keys)))
        attend_runs(q, *memory, state, 1, causal=False, fresh=False)
        if needs.planes:
            plane = memory[0][..., : PLANE_KV.run_bytes(q.shape[2])]
            attend_runs(q, plane, *memory[1:], state, 1, causal=False)


def _packed(keys: Tensor, values: Tensor) -> PackedMemory:
    """Return memory of a packed run, which has been packed and unpacked."""
    heads = len(keys)
    runs = torch.zeros((heads, 1, PACKED_KV.run_bytes(keys.shape[2])), dtype=torch.uint8, device=keys.device)
    pack_runs(keys, values, runs, 0, 1, 1)
    memory = runs, torch.full((heads, 1), -1, dtype=torch.int32, device=keys.device), keys, values
    rows = torch.arange(heads, device=keys.device)
    for has_values in (True, False):
        unpack_runs(memory, rows, rows * 0, 16, has_values)
    return memory


def _attend_groups(q: Tensor, keys: Tensor, values: Tensor) -> None:
    groups = quantize_groups(keys.unflatten(1, (-1, 32)), values.unflatten(1, (-1, 32)))
    for is_after in (True, False):
        result = accumulate.GroupAccumulator(q, len(keys))
        if is_after:
            result.attend_exact(slice(0, len(q)), keys, values, 0)
        result.attend_groups(slice(0, len(q)), groups, 1)
        result.partial()
