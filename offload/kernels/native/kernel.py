"""The kernel at one instruction set level, called with structs (calls.py, kv_groups.py, packed_kv.py) or tensors.

All functions raise InvalidCall for tensors that the kernel would read or write beyond.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...architecture.dims import LinearAttention
from .checks import FLOATS, address, check, check_head_dim, require
from .library import LEVELS, KernelUnavailable, open_library
from .structs import BLOCK, GROUP_INPUTS, OPERATIONS, Delta, Format, KeyScores, Pack, Rounding, Rows, Unpack

_OPERATION = {structure: number for number, structure in enumerate(OPERATIONS)}


@cache
def find_kernel(level: str = "auto", path: Path | None = None) -> Kernel:
    """Return the kernel at a level, or at the best level that this processor supports.

    Raises:
        KernelUnavailable: the kernel was not built or cannot be loaded, or the processor does not support the level.
    """
    library = open_library(path)
    for name in LEVELS if level == "auto" else (level,):
        handle = library.triforce_level(name.encode())
        if handle:
            return Kernel(name, library, handle)
    raise KernelUnavailable(f"this processor has no {level}")


class Kernel:
    """The functions of kernel.c at one level.

    Results depend on the level and the build, never on the number of threads or on other rows of the same call.
    """

    def __init__(self, level: str, library: ctypes.CDLL, handle: int) -> None:
        self.level = level
        self._handle = handle
        self._run, self._linears = library.triforce_run, library.triforce_linears
        self._limit_torch = library.triforce_limit_torch

    def run(self, call: ctypes.Structure) -> None:
        """Run an operation, that of its struct. Raises MemoryError; ValueError if a parent is not before its child."""
        _check(self._run(self._handle, _OPERATION[type(call)], ctypes.byref(call)))

    append = attend = observe = merge = quantize = pack_runs = run

    def linears(self, call: int, x: int, y: int, rows: int, stride: int, add: bool, wide: bool) -> None:
        """Write linears of rows at `x` to those at `y`, in fp32 if `wide`, or add them. Raises MemoryError.

        `call`, too, is an address: of `Linears`.
        """
        _check(self._linears(self._handle, call, x, y, rows, stride, add, wide))

    def round(self, call: Rounding) -> bool:
        """Round weights to fewer bits; return whether all are finite, and small enough for the format."""
        return self._run(self._handle, _OPERATION[Rounding], ctypes.byref(call)) == 0

    def score_keys(self, query: Tensor, panels: Tensor, scores: Tensor) -> None:
        """Write the products of each head's query `[heads, head_dim]` and its first keys to `scores` `[heads, keys]`.

        `panels` are those of `layout.new_key_panels`, in the query's dtype; scores are in fp32.
        """
        heads, head_dim = query.shape
        check_head_dim(head_dim)
        check("query", query, (heads, head_dim), *FLOATS)
        has_heads = panels.dim() == 3 and len(panels) == len(scores) == heads
        require(has_heads, "panels and scores are not of the query's heads")
        is_panels = panels.dtype == query.dtype and panels.shape[2] == BLOCK * head_dim and panels.is_cpu
        require(is_panels and panels.stride()[1:] == (BLOCK * head_dim, 1), "these are no contiguous panels of keys")
        require(scores.shape[1] <= panels.shape[1] * BLOCK, "more scores than keys")
        is_right = scores.stride(1) == 1 and scores.dtype == torch.float32 and scores.is_cpu
        require(is_right, "scores must have contiguous rows of fp32")
        self.run(
            KeyScores(
                query=query.data_ptr(),
                keys=panels.data_ptr(),
                scores=scores.data_ptr(),
                head_stride=panels.stride(0) * panels.itemsize,
                stride=scores.stride(0),
                count=scores.shape[1],
                heads=heads,
                head_dim=head_dim,
                wide=query.dtype == torch.float32,
            )
        )

    def delta(
        self,
        rule: tuple[LinearAttention, Tensor, Tensor, Tensor],
        rows: Tensor,
        gates: Tensor,
        state: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Run tokens by the gated delta rule; write their outputs `[tokens, value_heads, value_dim]`, and return them.

        `rule` is a `DeltaRule`, `rows` `[kernel - 1 + tokens, width]` those of `run_delta_rule` behind the inputs
        before them. The state is replaced.
        """
        sizes, conv, decay, bias = rule
        tensors = {"rows": rows, "gates": gates, "conv": conv, "decay": decay, "bias": bias, "state": state, "out": out}
        tokens, values = len(gates), sizes.value_heads
        for dim in (sizes.key_dim, sizes.value_dim):
            check_head_dim(dim)
        require(sizes.key_heads > 0 == values % sizes.key_heads, "value heads do not share key heads evenly")
        check("rows", rows, (sizes.kernel - 1 + tokens, sizes.width), *FLOATS)
        shapes = {"gates": (tokens, 2 * values), "conv": (sizes.kernel, sizes.width), "decay": (values,)}
        shapes |= {"state": (values, sizes.key_dim, sizes.value_dim), "out": (tokens, values, sizes.value_dim)}
        for name, size in {**shapes, "bias": (values,)}.items():
            check(name, tensors[name], size, torch.float32)
        call = Delta(**{name: x.data_ptr() for name, x in tensors.items()}, tokens=tokens)
        for name in ("width", "key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            setattr(call, name, getattr(sizes, name))
        call.wide = rows.dtype == torch.float32
        self.run(call)
        return out

    def pack(self, codes: Tensor, format: Format, weight: Tensor) -> None:
        """Store the codes `[rows, groups, 16 or 32]` of a `QuantizedTensor` in its panels."""
        _, groups, width = codes.shape
        is_codes = width in (16, 32) and codes.stride(2) == 1 and codes.itemsize == 1 and codes.is_cpu
        require(is_codes and (width == 32 or format.bits == 4), "codes are bytes, or of 4 bits halves of bytes")
        call = self._pack_call(codes, format, weight, GROUP_INPUTS * groups)
        call.group_stride, call.halves = codes.stride(1), width == 16
        self.run(call)

    def pack_blocks(self, blocks: Tensor, format: Format, weight: Tensor, inputs: int) -> None:
        """Store a matrix of which `blocks` `[rows, bytes]` are those of a GGUF file in its panels."""
        is_bytes = blocks.dim() == 2 and blocks.stride(1) == 1 and blocks.dtype == torch.uint8 and blocks.is_cpu
        require(is_bytes, "blocks are rows of bytes")
        call = self._pack_call(blocks, format, weight, inputs)
        call.row_bytes = blocks.shape[1]
        self.run(call)

    def _pack_call(self, source: Tensor, format: Format, weight: Tensor, inputs: int) -> Pack:
        check_panels(weight, inputs, len(source), format)
        pointers = {"codes": source.data_ptr(), "format": ctypes.addressof(format), "weight": weight.data_ptr()}
        return Pack(**pointers, row_stride=source.stride(0), rows=len(source), inputs=inputs)

    def unpack(self, weight: Tensor, format: Format, ids: Tensor, y: Tensor) -> Tensor:
        """Write rows `ids` `[rows]` of a packed quantised weight to `y` `[rows, in]`, bf16 or fp32, and return it."""
        rows, inputs = y.shape
        check("y", y, (rows, inputs), *FLOATS)
        check("ids", ids, (rows,), torch.int64)
        check_panels(weight, inputs, 0, format)
        if rows:
            least, most = (int(x) for x in ids.aminmax())
            require(least >= 0 and most < len(weight) * BLOCK, "there is no such row of the weight")
        pointers = {"weight": weight.data_ptr(), "format": ctypes.addressof(format), "ids": ids.data_ptr()}
        self.run(Unpack(**pointers, y=y.data_ptr(), rows=rows, inputs=inputs, wide=y.dtype == torch.float32))
        return y

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, y: Tensor) -> Tensor:
        """Write the RMSNorm of rows to `y`, and return it. All are of one dtype, `y` and the weight contiguous.

        x `[rows, width]` is contiguous; `[tokens, heads, width]` may have any stride between tokens.
        """
        check("weight", weight, (y.shape[-1],), x.dtype)
        return self._write_rows(x, weight, epsilon, y)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Write silu(gate) * up of rows `[rows, gate and up]` to `y` `[rows, width]`; return `y`."""
        return self._write_rows(x, None, 0.0, y)

    def _write_rows(self, x: Tensor, weight: Tensor | None, epsilon: float, y: Tensor) -> Tensor:
        *_, heads, width = y.shape
        has_heads = y.dim() == 3
        require(width % BLOCK == 0, f"rows of {width} are no multiple of {BLOCK}")
        check("y", y, y.shape, *FLOATS)
        size = y.shape if weight is not None else (*y.shape[:-1], 2 * width)
        require(x.shape == size and x.dtype == y.dtype and x.is_cpu, "x and y do not match")
        is_dense = x.stride()[1:] == (x.shape[2], 1) if has_heads else x.is_contiguous()
        require(is_dense, "rows of x are not contiguous")
        call = Rows(x=x.data_ptr(), weight=address(weight), y=y.data_ptr(), rows=y.numel() // width, width=width)
        call.heads, call.stride = (heads, x.stride(0)) if has_heads else (1, width)
        call.epsilon, call.wide = epsilon, x.dtype == torch.float32
        self.run(call)
        return y

    def limit_torch(self, limited: bool) -> None:
        """Limit torch's operations in the calling thread to one thread, or undo that. See `torch_on_one_thread`."""
        self._limit_torch(limited)


def check_panels(weight: Tensor, inputs: int, outputs: int, kind: torch.dtype | Format) -> None:
    """Raise InvalidCall if a packed weight of a dtype or format is not that of so many inputs, and at least outputs."""
    size, dtype = weight.shape, weight.dtype
    if isinstance(kind, Format):
        block, bytes_ = kind.block()
        is_right = dtype == torch.uint8 and len(size) == 3 and size[1] * block == inputs and size[2] == bytes_
    else:
        is_right = dtype == kind and inputs % 2 == 0 and weight.numel() == size[0] * BLOCK * inputs
    require(is_right and weight.is_contiguous() and weight.is_cpu, "no panels of that many inputs")
    require(size[0] * BLOCK >= outputs, "the weight has fewer outputs")


def _check(failed: int) -> None:
    if failed == 2:
        raise ValueError("a token's parent must come before it")
    if failed:
        raise MemoryError("the native kernel could not allocate memory for its intermediate results")
