"""Measures what packed keys and values gain in a CPU's own memory: attention to them beside attention to plain ones."""

from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..architecture.dims import Dimensions
from ..kernels.native import KernelUnavailable, find_kernel
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kv_groups import Groups, kv_format
from ..kernels.native.layout import write_blocks
from ..kernels.native.packed_kv import RUN_BLOCKS, pack_call
from ..kernels.native.structs import BLOCK
from ..kernels.native.threads import torch_on_one_thread
from ..settings.kv_formats import PACKED_KV
from .calibration import PackedGain

_TOKENS = 2**16  # 128 MiB of plain keys and values: more than caches hold
_SHAPE = Dimensions(1, 2048, 16, 4, 128, 2048, 256, True)  # grouped queries, as most models have them
_PAIRS = 11


def packed_gain(free: int, level: str = "auto") -> PackedGain | None:
    """Measure for a few tenths of a second with all of torch's threads: the median of runs that take turns.

    None without the native kernel of the level, and if `free` bytes are too few.
    """
    try:
        kernel = find_kernel(level)
    except KernelUnavailable:
        return None
    if free < 8 * _SHAPE.kv_bytes(_TOKENS, 2):
        return None
    with torch_on_one_thread(kernel):
        calls = _calls(kernel)
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(1 + _PAIRS):
            for call, own in zip(calls, times, strict=True):
                started = perf_counter()
                kernel.attend(call[0])
                own.append(perf_counter() - started)
    plain, packed = (each[1:] for each in times)  # the first ones warm up
    ratio = median(one / other for one, other in zip(plain, packed, strict=True))
    return PackedGain(round(ratio, 3), torch.get_num_threads(), kernel.level)


def _calls(kernel: Any) -> list[tuple[Any, ...]]:
    """Return calls of attention to plain and to packed keys and values, each with the memory that it reads.

    They are one run of 128 random tokens, over and over.
    """
    heads, dim, count = _SHAPE.kv_heads, _SHAPE.head_dim, _TOKENS // PACKED_KV.run
    keys, values = torch.randn(2, heads, PACKED_KV.run, dim).bfloat16()
    query = torch.randn(1, _SHAPE.heads, dim).bfloat16()
    run = torch.zeros(heads, RUN_BLOCKS, 2 * BLOCK * dim, dtype=torch.bfloat16)
    write_blocks(run, dim, torch.arange(PACKED_KV.run), keys, values)
    packed = torch.zeros(heads, 1, PACKED_KV.run_bytes(dim), dtype=torch.uint8)
    numbers = torch.arange(RUN_BLOCKS).repeat(heads, 1)
    items = torch.cat((torch.arange(heads).unsqueeze(1), numbers[:, :1], numbers), 1).int()
    fits = torch.zeros(heads, dtype=torch.uint8)
    kernel.pack_runs(pack_call(run, packed, items, fits))
    blocks, runs = run.repeat(1, count, 1), packed.repeat(1, count, 1)
    table = (~torch.arange(count * RUN_BLOCKS, dtype=torch.int32)).repeat(heads, 1)
    found = []
    for own, groups in ((None, None), (table, Groups(runs, kv_format(PACKED_KV.name)))):
        out = torch.zeros_like(query)
        call = BlockCalls(_SHAPE, blocks.shape[1]).attention(blocks, query, _TOKENS, table=own, out=out, groups=groups)
        found.append((call, blocks, query, out, own, groups))
    return found
