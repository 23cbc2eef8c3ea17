"""Attention over parts of the keys, and the merge of the partial results.

Softmax attention over any split of the keys is exact if every part returns its output and its log-sum-exp:
`o = sum_i softmax_i(lse_i) * o_i` (the online softmax of FlashAttention, arXiv 2205.14135, section 3.1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys: `out` `[tokens, heads, head_dim]`, `lse` `[tokens, heads]` in fp32."""

    out: Tensor
    lse: Tensor

    def output(self, lse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the output; `lse`, if given, is filled."""
        if lse is not None:
            lse.copy_(self.lse)
        return self.out.to(dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend with every query to every key: to keys and values that all precede the queries.

    Args:
        q: `[tokens, heads, head_dim]`, heads of a group side by side.
        k, v: `[kv_heads, keys, head_dim]`, any strides with a contiguous last axis, `keys` at least 1.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = len(k)
    # The heads of a group read the same keys. They are folded into the query axis, so that a key is read once for all.
    folded = q.view(tokens, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    # Where few rows would leave a GPU idle, its kernel divides the keys by itself (Flash-Decoding).
    out, lse = attend_heads(folded, k.unsqueeze(0), v.unsqueeze(0), causal=False)
    out = out.reshape(kv_heads, tokens, -1, head_dim).transpose(0, 1).reshape(tokens, heads, head_dim)
    return Partial(out, lse.reshape(kv_heads, tokens, -1).transpose(0, 1).reshape(tokens, heads))


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend causally where the last keys are the queries' own. Shapes as in `attend`; `keys` at least `tokens`."""
    before = k.shape[1] - len(q)
    if len(q) == 1:  # one token sees all keys, its own included, so no mask is needed
        return attend(q, k, v)
    # CUDA's FlashAttention aligns the mask with the last key (so says torch.nn.attention.bias); others with the first.
    if before == 0 or _has_cuda_flash(q):
        return _attend_causal(q, k, v)
    return merge([_attend_causal(q, k[:, before:], v[:, before:]), attend(q, k[:, :before], v[:, :before])])


def attend_masked(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, cap: float = 0.0) -> Partial:
    """Attend to few keys, of which each query sees its own: those of a tree of tokens in flight.

    Shapes as in `attend`; `sees` is bool `[tokens, keys]`, with a key at least for every token, None for all keys.
    Scores are capped if `cap` is not 0. `out` is in fp32.
    """
    tokens, heads, head_dim = q.shape
    grouped = q.view(tokens, len(k), -1, head_dim).permute(1, 2, 0, 3).float()  # [kv_heads, group, tokens, head_dim]
    keys, values = (x.unsqueeze(1).float() for x in (k, v))
    scores = (grouped @ keys.transpose(-1, -2)) * head_dim**-0.5
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    if sees is not None:
        scores.masked_fill_(~sees, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    out = scores.sub_(lse.unsqueeze(-1)).exp_() @ values
    return Partial(
        out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim), lse.permute(2, 0, 1).reshape(tokens, heads)
    )


def received_attention(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax weights of `attend_causal(q, k, v)`, summed over the queries: `[kv_heads, keys]` in fp32.

    `lse` `[tokens, heads]` is what it returned.
    """
    tokens, _, head_dim = q.shape
    grouped = q.view(tokens, len(k), -1, head_dim).permute(1, 2, 0, 3).float()  # [kv_heads, group, tokens, head_dim]
    scores = (grouped.flatten(1, 2) @ k.float().transpose(1, 2)).unflatten(1, (-1, tokens)) * head_dim**-0.5
    later = torch.ones((tokens, tokens), dtype=torch.bool, device=q.device).triu_(1)
    scores[..., k.shape[1] - tokens :].masked_fill_(later, float("-inf"))
    return scores.sub_(lse.T.view(len(k), -1, tokens, 1)).exp_().sum((1, 2))


def _attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    tokens, heads, head_dim = q.shape
    kv_heads, group = k.shape[0], heads // k.shape[0]
    # KV heads are on the batch axis and are expanded over the group with stride 0, so that no key is copied.
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    out, lse = attend_heads(grouped, keys, values, causal=True)
    return Partial(
        out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim), lse.permute(2, 0, 1).reshape(tokens, heads)
    )


def merge(partials: Sequence[Partial]) -> Partial:
    """Merge partials over disjoint keys into the partial over all of them; exact up to rounding in fp32."""
    if len(partials) == 1:
        return partials[0]
    lse = torch.stack([part.lse for part in partials])  # [parts, tokens, heads]
    total = lse.logsumexp(dim=0)
    weights = (lse - total).exp_().unsqueeze(-1)
    out = partials[0].out.float() * weights[0]
    for part, weight in zip(partials[1:], weights[1:], strict=True):
        out.addcmul_(part.out.float(), weight)
    return Partial(out.to(partials[0].out.dtype), total)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention whose softmax has one more key for each head, with the logit `sinks` `[heads]` and no value.

    `out` and `lse` are of the attention without it, as in `Partial`. The factor is exp(lse) / (exp(lse) + exp(sink)).
    """
    # In fp64: torch computes the last numbers of a thread's part otherwise than the rest. In fp32 a row's bits would
    # depend on the rows beside it.
    factor = (lse - sinks).double().sigmoid_().float()
    return (out.float() * factor.unsqueeze(-1)).to(out.dtype)


def state_of(part: Partial) -> Tensor:
    """Return a partial result as an accumulator's state; see `Accumulator.state`."""
    return torch.cat((part.lse.unsqueeze(-1), torch.ones_like(part.lse).unsqueeze(-1), part.out.float()), dim=-1)


def attend_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return out `[batch, heads, tokens, head_dim]` and lse `[batch, heads, tokens]` in fp32; q, k and v like out.

    Uses the library kernels that return the log-sum-exp, and `attend_by_blocks` where the device or dtype has none.
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if _has_cuda_flash(q):
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return result[0], result[1][..., : q.shape[2]]
    return attend_reference(q, k, v, causal) if causal else attend_by_blocks(q, k, v)


def _has_cuda_flash(q: Tensor) -> bool:
    if q.device.type != "cuda" or q.dtype == torch.float32 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, block: int = 4096) -> tuple[Tensor, Tensor]:
    """Apply `attend_reference` to blocks of keys and merge, because all scores of a long context would not fit."""
    parts = [attend_reference(q, *kv, False) for kv in zip(k.split(block, 2), v.split(block, 2), strict=True)]
    return merge([Partial(*part) for part in parts])


def attend_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition in fp32; the tests' reference, and the fallback without a library kernel."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.float()).to(q.dtype), lse
