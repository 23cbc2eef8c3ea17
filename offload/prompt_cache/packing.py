"""Packing of blocks without loss: bf16 numbers in 12 bits, by the native kernel; torch unpacks where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from ..kernels.native import Kernel, KernelUnavailable, find_kernel
from ..kernels.native.layout import keys_of, values_of, write_blocks
from ..kernels.native.packed_kv import RUN_BLOCKS, pack_call, unpack_call
from ..kernels.native.structs import BLOCK, MAX_HEAD_DIM
from ..kernels.packed_kv import unpack_runs
from ..settings.kv_formats import PACKED_KV

_RUN = PACKED_KV.run  # tokens


def packing_kernel(kernel: Kernel | None, device: torch.device) -> Kernel | None:
    """Return the kernel that packs for a model on a device whose own one is `kernel`; None: nothing is packed."""
    if device.type != "cpu":
        with suppress(KernelUnavailable):
            return find_kernel()
    return kernel


def pack(kv: Tensor, kernel: Kernel | None) -> dict[str, Tensor]:
    """Return the tensors of a file for a block's keys and values, as `Store.dump` returns them.

    "fits" `[layers, kv_heads]` says of which heads "packed" `[n, bytes]` has the runs; "kv" has those of the others. It
    is all of them where there is no kernel, or where these are not numbers in bf16 of 128 tokens.
    """
    dim = _head_dim(kv.shape[2:])
    if kernel is None or kv.dtype != torch.bfloat16 or not dim or dim % 32 or dim > MAX_HEAD_DIM:
        return {"kv": kv}
    rows = kv.flatten(0, 1)
    blocks = (rows if kv.dim() == 4 else _as_blocks(*rows.unbind(2))).contiguous()
    runs = torch.empty((1, len(rows), PACKED_KV.run_bytes(dim)), dtype=torch.uint8)
    fits = torch.empty(len(rows), dtype=torch.uint8)
    items = _items(numbers := torch.arange(len(rows)), numbers)  # a name: the call has its address alone
    kernel.pack_runs(pack_call(blocks.view(1, -1, blocks.shape[2]), runs, items, fits))
    packed = runs[0] if fits.all() else runs[0][fits == 1]
    return {"kv": rows[fits == 0], "fits": fits.view(kv.shape[:2]), "packed": packed}


def unpack(tensors: Mapping[str, Tensor], memory: Callable[[int], Tensor]) -> Tensor:
    """Return the keys and values of a file's tensors, as they were; in `memory(bytes)` where they were packed."""
    rest = tensors["kv"]
    if "fits" not in tensors:
        return rest
    fits, dim = tensors["fits"], _head_dim(rest.shape[1:])
    size = torch.Size((*fits.shape, *rest.shape[1:]))
    kv = memory(size.numel() * rest.itemsize).view(rest.dtype).view(size)
    rows, numbers, others = kv.flatten(0, 1), *((fits.flatten() == x).nonzero().squeeze(1) for x in (1, 0))
    rows[others] = rest
    try:
        kernel = find_kernel()
    except KernelUnavailable:  # there is none any more
        both = unpack_runs(tensors["packed"], dim)
        rows[numbers] = _as_blocks(*both) if kv.dim() == 4 else torch.stack(both, 2)
        return kv
    blocks = rows if kv.dim() == 4 else torch.empty((len(rows), RUN_BLOCKS, 2 * BLOCK * dim), dtype=kv.dtype)
    runs, items = tensors["packed"].unsqueeze(0), _items(torch.arange(len(numbers)), numbers)
    kernel.pack_runs(unpack_call(runs, items, blocks.view(1, -1, blocks.shape[2])))
    if kv.dim() == 5:
        for at, of in enumerate((keys_of, values_of)):
            rows[numbers, :, at] = of(blocks[numbers], dim).flatten(1, 2)
    return kv


def _head_dim(inner: torch.Size) -> int:
    """Return the dimensions of a head whose keys and values of a run are `inner`: blocks, or numbers; 0 if neither."""
    if len(inner) == 2 and inner[0] == RUN_BLOCKS and inner[1] % (2 * BLOCK) == 0:
        return inner[1] // (2 * BLOCK)
    return inner[2] if len(inner) == 3 and inner[:2] == (_RUN, 2) else 0


def _as_blocks(keys: Tensor, values: Tensor) -> Tensor:
    blocks = torch.empty((len(keys), RUN_BLOCKS, 2 * BLOCK * keys.shape[2]), dtype=keys.dtype)
    write_blocks(blocks, keys.shape[2], torch.arange(_RUN), keys, values)
    return blocks


def _items(runs: Tensor, rows: Tensor) -> Tensor:
    """Return items, as of `pack_call`, of runs, and of the rows whose blocks they have."""
    blocks = rows.unsqueeze(1) * RUN_BLOCKS + torch.arange(RUN_BLOCKS)
    return torch.cat((torch.stack((torch.zeros_like(runs), runs), 1), blocks), 1).to(torch.int32)
