"""The kernel's argument structs, filled from tensors. Dtypes, sizes and strides are checked here and nowhere else.

All functions raise InvalidCall for tensors that the kernel would read or write beyond. What tensors contain is not
checked: block tables and group numbers are the caller's. A struct holds addresses, not references, so its tensors must
live until the kernel has run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...architecture.dims import Dimensions
from .checks import FLOATS, address, check, check_head_dim, require
from .kv_groups import Groups, check_groups
from .structs import BLOCK, PIECE, Append, Attention, Merge, Observation

if TYPE_CHECKING:
    from .kernel import Kernel


class BlockCalls:
    """Builder of calls over the keys and values of one layer, which has `blocks` consecutive blocks for each KV head.

    `kv` is always a layer's tensor of `kv_heads * blocks * 2 * 16 * head_dim` elements, contiguous, bf16 or fp32; all
    other tensors have its dtype. Calls are built for every token and layer: what is the same in all of them is copied.
    """

    def __init__(self, shape: Dimensions, blocks: int) -> None:
        check_head_dim(shape.head_dim)
        self.tokens = blocks * BLOCK  # capacity
        self._kv_heads, self._heads, self._head_dim = shape.kv_heads, shape.kv_heads * shape.group, shape.head_dim
        self._head_elements = blocks * 2 * BLOCK * shape.head_dim
        self._appends: dict[torch.dtype, bytes] = {}
        self._attentions: dict[torch.dtype, bytes] = {}
        for dtype in FLOATS:
            same = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "wide": dtype == torch.float32}
            same["head_stride"] = self._head_elements * dtype.itemsize
            self._appends[dtype] = bytes(Append(**same))
            self._attentions[dtype] = bytes(Attention(group=shape.group, scale=shape.head_dim**-0.5, **same))

    def append(
        self,
        kv: Tensor,
        start: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor],
        rotated: Tensor,
        stored: int = 0,
        table: Tensor | None = None,
    ) -> Append:
        """Return a call that stores new tokens from position `start` on, and writes their rotated queries to `rotated`.

        Args:
            q: `[tokens, heads, head_dim]`, or with 0 heads where no queries are to be rotated; k and v
                `[tokens, kv_heads, head_dim]`; any stride between tokens.
            rows: cos and sin, `[tokens, 1, head_dim]`.
            rotated: as q.
            stored: how many of the first tokens are stored already; only their queries are rotated.
            table: `[blocks]`, int32: the block number of each block of the sequence; None for 0, 1, 2, ...
        """
        dtype, dim, (tokens, heads, _) = kv.dtype, self._head_dim, q.shape
        self._check_kv(kv, table)
        if table is not None:
            check("table", table, table.shape[:1], torch.int32)
        capacity = self.tokens if table is None else table.shape[0] * BLOCK
        require(0 <= stored <= tokens and 0 <= start <= capacity - tokens, "tokens beyond the last block")
        check("rotated", rotated, (tokens, heads, dim), dtype)
        cos, sin = rows
        check("cos", cos, (tokens, 1, dim), dtype)
        check("sin", sin, (tokens, 1, dim), dtype)
        require(k.shape == v.shape == (tokens, self._kv_heads, dim), "k and v have other heads or tokens")
        call = Append.from_buffer_copy(self._appends[dtype])
        call.q_stride, call.k_stride, call.v_stride = (self._stride(x, dtype) for x in (q, k, v))
        call.q, call.k, call.v, call.kv = q.data_ptr(), k.data_ptr(), v.data_ptr(), kv.data_ptr()
        call.cos, call.sin, call.rotated = cos.data_ptr(), sin.data_ptr(), rotated.data_ptr()
        call.start, call.tokens, call.stored, call.heads = start, tokens, stored, heads
        if table is not None:
            call.table = table.data_ptr()
        return call

    def _stride(self, x: Tensor, dtype: torch.dtype) -> int:
        """Return the elements between tokens of `x` `[tokens, heads, head_dim]`, whose heads are contiguous."""
        stride, *inner = x.stride()
        is_right = inner == [self._head_dim, 1] and x.shape[2] == self._head_dim and x.dtype == dtype and x.is_cpu
        require(is_right, "q, k or v has another dtype or size, or heads that are not contiguous")
        return stride

    def _check_kv(self, kv: Tensor, table: Tensor | None) -> None:
        """Raise InvalidCall if this is not a layer's memory; with a table, it may be another number of blocks."""
        has_room = table is not None or kv.numel() == self._kv_heads * self._head_elements
        require(has_room and kv.dtype in FLOATS and kv.is_contiguous() and kv.is_cpu, "kv is not the memory of a layer")

    def attention(
        self,
        kv: Tensor,
        q: Tensor,
        seen: int,
        causal: bool = True,
        table: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        partials: Tensor | None = None,
        parents: Tensor | None = None,
        groups: Groups | None = None,
        window: int = 0,
    ) -> Attention:
        """Return a call that attends with rotated queries. It writes either `out` and, if given, `lse`, or `partials`.

        Args:
            q: `[tokens, heads, head_dim]`, contiguous.
            seen: keys that the first token sees; if `causal`, each further token sees one more.
            table: `[kv_heads, blocks]`, int32, contiguous rows: block numbers in the order to attend to; None for all.
            out: in the shape and dtype of q, or fp32.
            lse: `[tokens, heads]` in fp32.
            partials: `[partial_count(...), tokens, heads, 2 + head_dim]` in fp32.
            parents: of a tree whose last tokens are those of `q`, int32: the index of each token's parent, which comes
                before it, or -1. The tree's keys are stored in this order; a token sees those before the tree, its
                ancestors' and its own, and its result has the bits of that chain. `seen` is what a token without parent
                sees. None for a chain.
            window: keys that a token sees at most, the last ones; 0 for all. Those before them are finite numbers.
            groups: quantised or packed keys and values, whose blocks are the table's entries below zero: ~b is block
                b. Packed ones may stand anywhere before the tokens in flight, and are bf16.
        """
        dtype, tokens = kv.dtype, q.shape[0]
        self._check_kv(kv, table)
        check("q", q, (tokens, self._heads, self._head_dim), dtype)
        call = Attention.from_buffer_copy(self._attentions[dtype])
        call.q, call.kv, call.seen, call.causal, call.tokens = q.data_ptr(), kv.data_ptr(), seen, causal, tokens
        call.window = window
        self._set_keys(call, seen, tokens, causal, table, parents)
        if groups is not None:
            require(table is not None and not window, "quantised groups are read by a table, and have no window")
            require(dtype == torch.bfloat16 or not groups.is_packed, "packed keys and values are bf16")
            check_groups(groups, self._kv_heads, self._head_dim)
            call.quantized, call.quantized_stride = groups.memory.data_ptr(), groups.memory.stride(0)
            call.kv_format = ctypes.addressof(groups.format)
        if out is not None:
            check("out", out, q.shape, dtype, torch.float32)
            call.out, call.narrow_out = out.data_ptr(), out.dtype == torch.bfloat16
        if lse is not None:
            check("lse", lse, q.shape[:2], torch.float32)
            call.lse = lse.data_ptr()
        if partials is not None:
            count = partial_count(seen, tokens, causal, parents) if tokens else len(partials)
            check("partials", partials, (count, *q.shape[:2], 2 + self._head_dim), torch.float32)
            call.partials = partials.data_ptr()
        return call

    def _set_keys(
        self, call: Attention, seen: int, tokens: int, causal: bool, table: Tensor | None, parents: Tensor | None
    ) -> None:
        """Set the table and the tree. Raises InvalidCall if a token sees keys that are not there."""
        more, capacity = (tokens - 1) * causal, self.tokens
        if table is not None:
            is_table = table.dim() == 2 and table.shape[0] == self._kv_heads and table.dtype == torch.int32
            require(is_table and table.stride(1) == 1 and table.is_cpu, "a table has a row of int32 for each KV head")
            capacity = table.shape[1] * BLOCK
            call.table, call.table_stride = table.data_ptr(), table.stride(0)
        if parents is not None:
            check("parents", parents, (len(parents),), torch.int32)
            require(bool(causal) and len(parents) >= tokens, "a tree has the tokens of the call, and is causal")
            more = len(parents) - 1
            call.parents, call.nodes = parents.data_ptr(), len(parents)
        require(1 <= seen <= capacity - more and call.window >= 0, "attention beyond the last block, or to no key")

    def partials(self, kernel: Kernel, kv: Tensor, q: Tensor, seen: int, causal: bool = True, **more: Any) -> Tensor:
        """Attend now, with the arguments of `attention`; return partial results, which `Kernel.merge` takes."""
        count = partial_count(seen, len(q), causal, more.get("parents"))
        partials = torch.empty((count, *q.shape[:2], 2 + self._head_dim), dtype=torch.float32)
        kernel.run(self.attention(kv, q, seen, causal, partials=partials, **more))
        return partials

    def observation(
        self,
        kv: Tensor,
        q: Tensor,
        seen: int,
        lse: Tensor,
        received: Tensor,
        table: Tensor | None = None,
        groups: Groups | None = None,
    ) -> Observation:
        """Return a call that adds the softmax weights of `attention(kv, q, seen, table=table, ...)` to `received`.

        Args:
            lse: `[tokens, heads]` in fp32, as that attention has returned it.
            received: `[kv_heads, at least the keys that the last token sees]` in fp32, contiguous rows: for each key,
                in the order of the table, the sum over the tokens and over the query heads of its KV head.
        """
        has_room = len(received) == self._kv_heads and received.shape[1] >= seen + len(q) - 1
        require(has_room and received.dtype == torch.float32 and received.is_cpu, "the sums have no room for all keys")
        require(received.stride(1) == 1, "a row of the sums is not contiguous")
        attention = self.attention(kv, q, seen, table=table, lse=lse, groups=groups)
        return Observation(attention=attention, received=received.data_ptr(), stride=received.stride(0))


def partial_count(seen: int, tokens: int, causal: bool, parents: Tensor | None = None) -> int:
    """Return the number of partial results for `tokens` queries, the first of which sees `seen` keys.

    With the `parents` of a tree, its last tokens are meant, and `seen` is what a token without parent sees.
    """
    more = (tokens - 1) * causal if parents is None else max(token_depths(parents.tolist())[-tokens:])
    return -(-(seen + more) // PIECE)


def token_depths(parents: Sequence[int]) -> list[int]:
    """Return how many ancestors each token of a tree has; each comes after its parent, and -1 is none."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def merge_call(
    into: Tensor, partials: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None
) -> Merge:
    """Return a call that merges `partials` `[count, tokens, heads, 2 + head_dim]`, in order, into `into`.

    `into` is the running result; both are fp32. `out` `[tokens, heads, head_dim]`, fp32 or bf16, receives the attention
    over everything merged, and `lse` `[tokens, heads]` in fp32 its log-sum-exp.
    """
    tokens, heads, width = into.shape
    check_head_dim(width - 2)
    check("into", into, (tokens, heads, width), torch.float32)
    if partials is not None:
        check("partials", partials, (len(partials), *into.shape), torch.float32)
    if out is not None:
        check("out", out, (tokens, heads, width - 2), *FLOATS)
    if lse is not None:
        check("lse", lse, (tokens, heads), torch.float32)
    return Merge(
        into=into.data_ptr(),
        partials=address(partials),
        out=address(out),
        lse=address(lse),
        rows=tokens * heads,
        pieces=0 if partials is None else len(partials),
        head_dim=width - 2,
        narrow_out=out is not None and out.dtype == torch.bfloat16,
    )
