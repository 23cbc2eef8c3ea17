"""The kernel at one instruction set level, called with structs (see calls.py) or tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...architecture.dims import LinearAttention
from .calls import delta_call, score_call
from .library import LEVELS, KernelUnavailable, open_library
from .row_calls import pack_call, rows_call, unpack_call
from .structs import (
    Append,
    Attention,
    Format,
    Merge,
    Observation,
    Packing,
    Pass,
    Quantize,
    Rounding,
)

DTYPES = (torch.bfloat16, torch.float32)


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
        self._append = library.triforce_append
        self._attend, self._merge = library.triforce_attend, library.triforce_merge
        self._observe, self._score_keys = library.triforce_observe, library.triforce_score_keys
        self._linears, self._run, self._delta = library.triforce_linears, library.triforce_run, library.triforce_delta
        self._pack, self._unpack = library.triforce_pack, library.triforce_unpack
        self._norm, self._gate = library.triforce_norm, library.triforce_gate
        self._round = library.triforce_round
        self._quantize, self._pack_runs = library.triforce_quantize, library.triforce_pack_runs
        self._limit_torch = library.triforce_limit_torch

    def append(self, call: Append) -> None:
        """Rotate queries and keys, and store keys and values in their blocks."""
        self._append(ctypes.byref(call))

    def attend(self, call: Attention) -> None:
        """Attend to blocks of keys and values. Raises MemoryError; ValueError if a parent is not before its child."""
        _check(self._attend(self._handle, ctypes.byref(call)))

    def observe(self, call: Observation) -> None:
        """Add up the softmax weights of attention that has been computed. Raises MemoryError."""
        _check(self._observe(self._handle, ctypes.byref(call)))

    def score_keys(self, query: Tensor, panels: Tensor, scores: Tensor) -> None:
        """Write the products of each head's query `[heads, head_dim]` and its first keys to `scores` `[heads, keys]`.

        `panels` are those of `layout.new_key_panels`, in the query's dtype; scores are in fp32.
        """
        self._score_keys(self._handle, ctypes.byref(score_call(query, panels, scores)))

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
        self._delta(self._handle, ctypes.byref(delta_call(rule, rows, gates, state, out)))
        return out

    def merge(self, call: Merge) -> None:
        """Merge partial results, in order, into a running one; write the attention if the call has room for it."""
        self._merge(self._handle, ctypes.byref(call))

    def linears(self, call: int, x: int, y: int, rows: int, stride: int, add: bool, wide: bool) -> None:
        """Write linears of rows at `x` to those at `y`, in fp32 if `wide`, or add them. Raises MemoryError.

        `call`, too, is an address.
        """
        _check(self._linears(self._handle, call, x, y, rows, stride, add, wide))

    def run(self, call: Pass) -> None:
        """Run a few tokens through layers. Raises MemoryError; ValueError if a parent is not before its child."""
        _check(self._run(self._handle, ctypes.byref(call)))

    def pack(self, codes: Tensor, format: Format, weight: Tensor) -> None:
        """Store the codes of a `QuantizedTensor` in its panels."""
        self._pack(ctypes.byref(pack_call(codes, format, weight)))

    def round(self, call: Rounding) -> bool:
        """Round weights to fewer bits; return whether all are finite, and small enough for the format."""
        return self._round(self._handle, ctypes.byref(call)) == 0

    def quantize(self, call: Quantize) -> None:
        """Quantise groups of keys and values, or dequantise them if the call has room for those."""
        self._quantize(self._handle, ctypes.byref(call))

    def pack_runs(self, call: Packing) -> None:
        """Pack runs of keys and values without loss, or unpack them to blocks if the call has no room for `fits`."""
        self._pack_runs(ctypes.byref(call))

    def unpack(self, weight: Tensor, format: Format, ids: Tensor, y: Tensor) -> Tensor:
        """Write rows `ids` `[rows]` of a packed quantised weight to `y` `[rows, in]`, bf16 or fp32, and return it."""
        call = unpack_call(weight, format, ids, y)
        self._unpack(ctypes.byref(call))
        return y

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, y: Tensor) -> Tensor:
        """Write the RMSNorm of rows to `y`, and return it. All are of one dtype, `y` and the weight contiguous.

        x `[rows, width]` is contiguous; `[tokens, heads, width]` may have any stride between tokens.
        """
        call = rows_call(x, y, weight, epsilon)
        self._norm(self._handle, ctypes.byref(call))
        return y

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Write silu(gate) * up of rows `[rows, gate and up]` to `y` `[rows, width]`; return `y`."""
        call = rows_call(x, y)
        self._gate(self._handle, ctypes.byref(call))
        return y

    def limit_torch(self, limited: bool) -> None:
        """Limit torch's operations in the calling thread to one thread, or undo that. See `torch_on_one_thread`."""
        self._limit_torch(limited)


def _check(failed: int) -> None:
    if failed == 2:
        raise ValueError("a token's parent must come before it")
    if failed:
        raise MemoryError("the native kernel could not allocate memory for its intermediate results")
