"""Block files: the KV of one block of a prompt, with a header and a checksum that identify it.

They are safetensors files. A block is read into memory of its own in one go: what was verified is what is used, even
if the file changes or its disk fails, which is not so with a file that is mapped.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.native import Kernel, KernelUnavailable, find_kernel
from ..kernels.native.layout import keys_of, values_of, write_blocks
from ..kernels.native.packed_kv import RUN_BLOCKS, pack_call, unpack_call
from ..kernels.native.structs import BLOCK, MAX_HEAD_DIM
from ..kernels.packed_kv import unpack_runs
from ..settings.kv_formats import PACKED_KV
from ..system.files import replace_file
from .folder import Header, UnusableBlock

NAMES = ("ids", "kv", "fits", "packed")  # of a file's tensors; without the last two, nothing in it is packed
_RUN = PACKED_KV.run


def packing_kernel(kernel: Kernel | None, device: torch.device) -> Kernel | None:
    """Return the kernel that packs for a model on a device whose own one is `kernel`; None: nothing is packed."""
    if device.type != "cpu":
        with suppress(KernelUnavailable):
            return find_kernel()
    return kernel


def pack(kv: Tensor, kernel: Kernel | None) -> dict[str, Tensor]:
    """Return the tensors of a file for a run's keys and values, as `Store.dump` returns them.

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


_DTYPES = {"I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)  # of a header


class Buffer:
    """Memory that is used again for each file that is read into it, and other memory for what it is unpacked to."""

    def __init__(self) -> None:
        self._bytes: np.ndarray = np.empty(0, np.uint8)
        self._unpacked: Buffer | None = None

    @property
    def unpacked(self) -> Buffer:
        """Return the other memory."""
        self._unpacked = self._unpacked or Buffer()
        return self._unpacked

    def take(self, size: int) -> np.ndarray:
        """Return `size` bytes, uninitialised, which the next call may return again."""
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size]


def write_block(path: Path, header: Header, ids: Sequence[int], kv: Tensor | Mapping[str, Tensor]) -> int:
    """Save KV as `Store.dump` returns it, or as `pack` does, and return the file's bytes. Raises OSError.

    The KV goes to the file as it lies in memory: the library of safetensors would copy it twice.
    """
    own, texts = {"kv": kv} if isinstance(kv, Tensor) else kv, header.texts()
    tensors = {"ids": torch.tensor(ids)} | {name: tensor.contiguous() for name, tensor in own.items()}
    entries: dict[str, dict[str, Any]] = {"__metadata__": texts | {"checksum": _checksum(texts, tensors)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    replace_file(path, len(head).to_bytes(8, "little"), head, *map(_bytes, tensors.values()))
    return 8 + len(head) + end


def read_block(
    path: Path, key: str, ids: Sequence[int], part: str = "", buffer: Buffer | None = None
) -> tuple[Tensor, Header]:
    """Return a file's KV, which lies in the buffer, and its header, after its checksum has been verified.

    Raises FileNotFoundError, and UnusableBlock for a file that is damaged or is not the block `key` of these tokens.
    """
    buffer = buffer or Buffer()
    try:
        data = _read(path, buffer)
    except FileNotFoundError:
        raise
    except (OSError, MemoryError) as error:  # MemoryError: a file of an absurd size
        raise UnusableBlock(str(error)) from error
    header, tensors = verify_block(data, key, ids, part)
    return unpack(tensors, lambda size: torch.from_numpy(buffer.unpacked.take(size))), header


def verify_block(data: np.ndarray, key: str, ids: Sequence[int], part: str = "") -> tuple[Header, dict[str, Tensor]]:
    """Return the header and the tensors, which are views, of a block's bytes.

    Raises UnusableBlock for what is damaged or is not the block `key` of these tokens.
    """
    texts, tensors = _parse(data)
    if (texts.get("key"), texts.get("part")) != (key, part):
        raise UnusableBlock("it is a different block")
    if texts.pop("checksum", None) != _checksum(texts, tensors):
        raise UnusableBlock("its checksum is wrong")
    if tensors["ids"].tolist() != list(ids):
        raise UnusableBlock("it has different tokens")
    return Header.read(texts), tensors


def _read(path: Path, buffer: Buffer) -> np.ndarray:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
        raise UnusableBlock("it is not a regular file")
    with open(path, "rb", buffering=0) as file:
        data = buffer.take(os.fstat(file.fileno()).st_size)
        done = 0
        while done < len(data) and (count := file.readinto(data[done:])):
            done += count
    return data[:done]


def _parse(data: np.ndarray) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and tensors of a safetensors file: views, where its library would copy."""
    try:
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        texts = header.pop("__metadata__", {})
        names = NAMES[: len(header)]
        if set(names) != set(header) or len(names) not in (2, 4):
            return dict(texts), {}  # of another kind
        return dict(texts), {name: _tensor(data[start:], **header[name]) for name in names}
    except _DAMAGE as error:
        raise UnusableBlock(f"its header is damaged: {type(error).__name__}") from error


def _tensor(data: np.ndarray, dtype: str, shape: Sequence[int], data_offsets: tuple[int, int]) -> Tensor:
    first, last = data_offsets
    return torch.from_numpy(data[first:last]).view(_DTYPES[dtype]).view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _checksum(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    import xxhash  # here: an engine without a prompt cache does without it, as the check of a bare GPU machine does

    digest = xxhash.xxh3_128(json.dumps(sorted(texts.items())).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()
