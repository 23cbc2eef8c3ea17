"""Attention as a merge of partials: one primitive and one way to join its answers.

Softmax attention over any split of the keys is exact if every part returns its output and its log-sum-exp:
`o = sum_i softmax_i(lse_i) * o_i` (the online softmax of FlashAttention, arXiv 2205.14135, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS_A_BLOCK = 64  # query rows that one processor of a GPU takes at once
_LEAST_KEYS = 256  # of a split: less is not worth a merge


class Partial(NamedTuple):
    """Attention over some of the keys: `out` `[tokens, heads, head_dim]`, `lse` `[tokens, heads]` in fp32."""

    out: Tensor
    lse: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, splits: int | None = None) -> Partial:
    """Every query over every key: a part of the KV that lies wholly before the queries.

    Args:
        q: `[tokens, heads, head_dim]`, heads of a group side by side.
        k, v: `[kv_heads, keys, head_dim]`, any strides with a contiguous last axis, `keys` at least 1.
        splits: parts of the keys that are attended to side by side; None for as many as keep the device busy.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, keys = k.shape[:2]
    # A group's heads read the same keys: folded into the query axis, each key is read once for all of them.
    folded = q.view(tokens, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    splits = _useful_splits(folded, keys) if splits is None else splits
    if splits > 1:
        out, lse = _attend_split(folded, k, v, splits)
    else:
        out, lse = _attend_heads(folded, k.unsqueeze(0), v.unsqueeze(0), causal=False)
    out = out.reshape(kv_heads, tokens, -1, head_dim).transpose(0, 1).reshape(tokens, heads, head_dim)
    return Partial(out, lse.reshape(kv_heads, tokens, -1).transpose(0, 1).reshape(tokens, heads))


def _useful_splits(q: Tensor, keys: int) -> int:
    """A GPU's kernel gives each of its processors a head and some rows: for a few rows of a few heads most would idle.

    So the keys are split until there is work for all (Flash-Decoding). The CPU's kernels see to that themselves.
    """
    if q.device.type != "cuda":
        return 1
    work = q.shape[1] * -(-q.shape[2] // _ROWS_A_BLOCK)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return max(1, min(processors // work, keys // _LEAST_KEYS))


def _attend_split(q: Tensor, k: Tensor, v: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """q `[1, kv_heads, rows, head_dim]`, k and v `[kv_heads, keys, head_dim]`: equal parts at once, and the rest."""
    each = k.shape[1] // splits
    parts = [x[:, : splits * each].unflatten(1, (splits, each)).transpose(0, 1) for x in (k, v)]
    out, lse = _attend_heads(q.expand(splits, -1, -1, -1), *parts, causal=False)
    found = [Partial(*part) for part in zip(out, lse, strict=True)]
    if splits * each < k.shape[1]:
        rest = _attend_heads(q, *(x[:, splits * each :].unsqueeze(0) for x in (k, v)), causal=False)
        found.append(Partial(*(x[0] for x in rest)))
    out, lse = merge(found)
    return out.unsqueeze(0), lse.unsqueeze(0)


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """The in-flight tokens over themselves: token i over keys 0 to i. Shapes as in `attend`, `keys` equal to tokens."""
    tokens, heads, head_dim = q.shape
    kv_heads, group = k.shape[0], heads // k.shape[0]
    # KV heads stand on the batch axis and are expanded over the group with stride 0: no copy of a key is made.
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    out, lse = _attend_heads(grouped, keys, values, causal=True)
    return Partial(
        out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim), lse.permute(2, 0, 1).reshape(tokens, heads)
    )


def merge(partials: Sequence[Partial]) -> Partial:
    """Join partials over disjoint keys into the partial over all of them; exact up to rounding in fp32."""
    if len(partials) == 1:
        return partials[0]
    lse = torch.stack([part.lse for part in partials])  # [parts, tokens, heads]
    total = lse.logsumexp(dim=0)
    weights = (lse - total).exp_().unsqueeze(-1)
    out = partials[0].out.float() * weights[0]
    for part, weight in zip(partials[1:], weights[1:], strict=True):
        out.addcmul_(part.out.float(), weight)
    return Partial(out.to(partials[0].out.dtype), total)


def _attend_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q `[batch, heads, tokens, head_dim]`, k and v alike -> out alike and lse `[batch, heads, tokens]` in fp32.

    The library kernels that return the log-sum-exp; `_attend_in_blocks` where there is none for the device and dtype.
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if _has_cuda_flash(q):
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return result[0], result[1][..., : q.shape[2]]
    return _attend_plainly(q, k, v, causal) if causal else _attend_in_blocks(q, k, v)


def _has_cuda_flash(q: Tensor) -> bool:
    if q.device.type != "cuda" or q.dtype == torch.float32 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, block: int = 4096) -> tuple[Tensor, Tensor]:
    """The definition over blocks of keys, merged: a book's worth of scores at once would not fit."""
    parts = [_attend_plainly(q, *kv, False) for kv in zip(k.split(block, 2), v.split(block, 2), strict=True)]
    return merge([Partial(*part) for part in parts])


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition, in fp32: the oracle of the tests, and the fallback where no kernel returns the log-sum-exp."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.float()).to(q.dtype), lse
