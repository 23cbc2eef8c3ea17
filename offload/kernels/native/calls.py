"""The kernel's argument structs, filled from tensors. Dtypes, sizes and strides are asserted here and nowhere else.

A struct holds addresses, not references, so its tensors must live until the kernel has run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...architecture.dims import Dimensions, LinearAttention
from .kv_groups import Groups
from .library import (
    BLOCK,
    PIECE,
    Append,
    Attention,
    Delta,
    Format,
    KeyScores,
    Merge,
    Observation,
    Pack,
    Product,
    Rows,
    Unpack,
)


class BlockCalls:
    """Builder of calls over the keys and values of one layer, which has `blocks` consecutive blocks for each KV head.

    `kv` is always a layer's tensor of `kv_heads * blocks * 2 * 16 * head_dim` elements, contiguous, bf16 or fp32; all
    other tensors have its dtype. Calls are built for every token and layer, so constants are computed once.
    """

    def __init__(self, shape: Dimensions, blocks: int) -> None:
        self.tokens = blocks * BLOCK  # capacity
        self._kv_heads, self._group = shape.kv_heads, shape.group
        self._head_dim, self._scale = shape.head_dim, shape.head_dim**-0.5
        self._head_elements = blocks * 2 * BLOCK * shape.head_dim

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
        tokens = len(q)
        capacity = self.tokens if table is None else len(table) * BLOCK
        assert stored <= tokens and start + tokens <= capacity, "tokens beyond the last block"
        assert table is None or (table.dtype == torch.int32 and table.is_contiguous())
        assert kv.is_contiguous() and rotated.is_contiguous() and rows[0].is_contiguous() and rows[1].is_contiguous()
        q_stride, k_stride, v_stride = (self._token_stride(x, kv.dtype) for x in (q, k, v))
        return Append(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            cos=rows[0].data_ptr(),
            sin=rows[1].data_ptr(),
            rotated=rotated.data_ptr(),
            kv=kv.data_ptr(),
            table=_address(table),
            q_stride=q_stride,
            k_stride=k_stride,
            v_stride=v_stride,
            head_stride=self._head_elements * kv.itemsize,
            start=start,
            tokens=tokens,
            stored=stored,
            heads=q.shape[1],
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            wide=kv.dtype == torch.float32,
        )

    def _token_stride(self, x: Tensor, dtype: torch.dtype) -> int:
        """Return the elements between tokens of `x` `[tokens, heads, head_dim]`, whose heads are contiguous."""
        stride, *inner = x.stride()
        assert inner == [self._head_dim, 1] and x.dtype == dtype
        return stride

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
            groups: quantised keys and values, whose blocks are the table's entries below zero: ~b is block b.
        """
        assert groups is None or (table is not None and not window)
        dtype, tokens = kv.dtype, len(q)
        capacity = self.tokens if table is None else table.shape[1] * BLOCK
        more = (tokens - 1) * causal if parents is None else len(parents) - 1
        assert seen + more <= capacity, "attention beyond the last block"
        assert q.is_contiguous() and q.dtype == dtype and kv.is_contiguous()
        assert table is None or (table.dtype == torch.int32 and table.stride(1) == 1)
        assert parents is None or (causal and len(parents) >= tokens and parents.dtype == torch.int32)
        assert parents is None or parents.is_contiguous()
        assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous())
        return Attention(
            q=q.data_ptr(),
            kv=kv.data_ptr(),
            table=_address(table),
            out=_address(out),
            lse=_address(lse),
            head_stride=self._head_elements * kv.itemsize,
            table_stride=0 if table is None else table.stride(0),
            seen=seen,
            causal=causal,
            tokens=tokens,
            kv_heads=self._kv_heads,
            group=self._group,
            head_dim=self._head_dim,
            wide=dtype == torch.float32,
            narrow_out=out is not None and out.dtype == torch.bfloat16,
            scale=self._scale,
            partials=_address(partials),
            parents=_address(parents),
            nodes=0 if parents is None else len(parents),
            quantized=None if groups is None else groups.memory.data_ptr(),
            quantized_stride=0 if groups is None else groups.memory.stride(0),
            kv_format=None if groups is None else ctypes.addressof(groups.format),
            window=window,
        )

    def observation(
        self, kv: Tensor, q: Tensor, seen: int, lse: Tensor, received: Tensor, table: Tensor | None = None
    ) -> Observation:
        """Return a call that adds the softmax weights of `attention(kv, q, seen, table=table)` to `received`.

        Args:
            lse: `[tokens, heads]` in fp32, as that attention has returned it.
            received: `[kv_heads, at least the keys that the last token sees]` in fp32, contiguous rows: for each key,
                in the order of the table, the sum over the tokens and over the query heads of its KV head.
        """
        assert lse.shape == q.shape[:2] and lse.is_contiguous() and lse.dtype == torch.float32
        assert received.shape[0] == self._kv_heads and received.shape[1] >= seen + len(q) - 1
        assert received.stride(1) == 1 and received.dtype == torch.float32
        attention = self.attention(kv, q, seen, table=table, lse=lse)
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


def score_call(query: Tensor, panels: Tensor, scores: Tensor) -> KeyScores:
    """Return a call that writes the products of queries and keys. See `Kernel.score_keys`."""
    heads, head_dim = query.shape
    assert query.is_contiguous() and query.dtype == panels.dtype and panels[0].is_contiguous()
    assert len(panels) == len(scores) == heads and panels[0, 0].numel() == BLOCK * head_dim
    assert scores.shape[1] <= panels.shape[1] * BLOCK and scores.stride(1) == 1 and scores.dtype == torch.float32
    return KeyScores(
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


def delta_call(
    rule: tuple[LinearAttention, Tensor, Tensor, Tensor], rows: Tensor, gates: Tensor, state: Tensor, out: Tensor
) -> Delta:
    """Return a call that runs tokens of a layer with linear attention. See `Kernel.delta`."""
    sizes, conv, decay, bias = rule
    tensors = {"rows": rows, "gates": gates, "conv": conv, "decay": decay, "bias": bias, "state": state, "out": out}
    assert all(x.is_contiguous() for x in tensors.values()), "the kernel reads whole rows"
    assert all(x.dtype == torch.float32 for name, x in tensors.items() if name != "rows")
    tokens, heads = len(gates), (sizes.value_heads, sizes.key_dim, sizes.value_dim)
    assert rows.shape == (sizes.kernel - 1 + tokens, sizes.width) and gates.shape[1] == 2 * sizes.value_heads
    assert conv.shape == (sizes.kernel, sizes.width) and state.shape == heads and out.shape == (tokens, *heads[::2])
    return Delta(
        **{name: x.data_ptr() for name, x in tensors.items()},
        tokens=tokens,
        width=sizes.width,
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        kernel=sizes.kernel,
        wide=rows.dtype == torch.float32,
    )


def merge_call(into: Tensor, partials: Tensor | None = None, out: Tensor | None = None) -> Merge:
    """Return a call that merges `partials` `[count, tokens, heads, 2 + head_dim]`, in order, into `into`.

    `into` is the running result; both are fp32. `out` `[tokens, heads, head_dim]`, fp32 or bf16, receives the attention
    over everything merged.
    """
    assert into.is_contiguous()
    assert partials is None or (partials.shape[1:] == into.shape and partials.is_contiguous())
    tokens, heads, width = into.shape
    return Merge(
        into=into.data_ptr(),
        partials=_address(partials),
        out=_address(out),
        rows=tokens * heads,
        pieces=0 if partials is None else len(partials),
        head_dim=width - 2,
        narrow_out=out is not None and out.dtype == torch.bfloat16,
    )


def product_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None, y: Tensor, format: Format | None = None
) -> Product:
    """Return a call that computes y = x W^T + bias + onto. See `Kernel.linear`."""
    assert x.is_contiguous() and x.dtype == (weight.dtype if format is None else torch.bfloat16)
    assert onto is None or (onto.stride() == y.stride() and onto.dtype == x.dtype)
    rows, inputs = x.shape
    return Product(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=_address(bias),
        onto=_address(onto),
        y=y.data_ptr(),
        format=None if format is None else ctypes.addressof(format),
        rows=rows,
        inputs=inputs,
        outputs=y.shape[1],
        stride=y.stride(0),
        wide=x.dtype == torch.float32,
        wide_out=y.dtype == torch.float32,
    )


def pack_call(codes: Tensor, format: Format, weight: Tensor) -> Pack:
    """Return a call that stores the codes of a `QuantizedTensor` in the panels of `weight`."""
    rows, groups, width = codes.shape
    assert codes.stride(2) == 1 and codes.itemsize == 1 and weight.is_contiguous()
    return Pack(
        codes=codes.data_ptr(),
        row_stride=codes.stride(0),
        group_stride=codes.stride(1),
        halves=width == 16,
        format=ctypes.addressof(format),
        weight=weight.data_ptr(),
        rows=rows,
        inputs=32 * groups,
    )


def unpack_call(weight: Tensor, format: Format, ids: Tensor, y: Tensor) -> Unpack:
    """Return a call that dequantises rows `ids` `[rows]` of a packed weight to `y` `[rows, inputs]`."""
    assert weight.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int64 and y.is_contiguous()
    return Unpack(
        weight=weight.data_ptr(),
        format=ctypes.addressof(format),
        ids=ids.data_ptr(),
        y=y.data_ptr(),
        rows=len(y),
        inputs=y.shape[1],
        wide=y.dtype == torch.float32,
    )


def rows_call(x: Tensor, y: Tensor, weight: Tensor | None = None, epsilon: float = 0.0) -> Rows:
    """Return a call that writes the RMSNorm of `x`, or without a weight its gate, to `y` `[..., width]`, contiguous.

    For a norm x may be `[tokens, heads, width]` with any stride between tokens.
    """
    *_, heads, width = y.shape
    has_heads = y.dim() == 3
    assert y.is_contiguous() and (weight is None or (x.dtype == weight.dtype and x.shape == y.shape))
    assert x.is_contiguous() if not has_heads else x.stride()[1:] == (width, 1)
    return Rows(
        x=x.data_ptr(),
        weight=_address(weight),
        y=y.data_ptr(),
        rows=y.numel() // width,
        width=width,
        heads=heads if has_heads else 1,
        stride=x.stride(0) if has_heads else width,
        epsilon=epsilon,
        wide=x.dtype == torch.float32,
    )


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
