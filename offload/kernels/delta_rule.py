"""Linear attention by the gated delta rule (arXiv 2412.06464, section 3), with the causal convolution before it.

Each value head has a state S `[key_dim, value_dim]`. A token with query q, key k, value v, decay a and rate b makes it
S = a S + b k (v - a S^T k)^T, and its output is S^T q. Token by token this is memory bound; many tokens are computed in
chunks, as products of matrices, up to rounding the same.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.dims import LinearAttention
from .native import Kernel

CHUNK = 64  # tokens that are computed together
_LEAST = 16  # tokens of which that is faster
_EPSILON = 1e-6  # of the norms of q and k


class DeltaRule(NamedTuple):
    """The sizes and weights of one layer, in fp32."""

    sizes: LinearAttention
    conv: Tensor  # [kernel, width]; the last row is the token's own
    decay: Tensor  # [value_heads], negative: of the logarithm of a state's decay
    dt_bias: Tensor  # [value_heads]


def run_delta_rule(
    rule: DeltaRule, before: Tensor, rows: Tensor, gates: Tensor, state: Tensor, kernel: Kernel | None = None
) -> Tensor:
    """Run tokens from a state, which is replaced by the one behind them; return `[tokens, value_heads, value_dim]`.

    All is computed in fp32; by the native kernel, if there is one, in the same bits whatever tokens are beside one.

    Args:
        before: the inputs of the tokens before, `[kernel - 1, width]`; zeros before the first one.
        rows: q, k and v of all heads before the convolution, `[tokens, width]`.
        gates: of the rates b and of the decays, `[tokens, 2 * value_heads]` in fp32.
        state: `[value_heads, key_dim, value_dim]` in fp32.
    """
    every = torch.cat((before, rows))
    if kernel is None:
        return _run(rule, _convolved(rule.conv, every), gates, state)
    out = state.new_empty((len(rows), rule.sizes.value_heads, rule.sizes.value_dim))
    return kernel.delta(rule, every, gates, state, out)


def _convolved(weight: Tensor, rows: Tensor) -> Tensor:
    """Return the causal convolution of rows, each channel by itself, without the first `kernel - 1` rows."""
    count = len(rows) - len(weight) + 1
    total = rows[:count] * weight[0]
    for shift in range(1, len(weight)):
        total += rows[shift : shift + count] * weight[shift]
    return F.silu(total)


def _run(rule: DeltaRule, rows: Tensor, gates: Tensor, state: Tensor) -> Tensor:
    sizes = rule.sizes
    q, k, v = rows.split((sizes.keys, sizes.keys, sizes.values), dim=-1)
    group = sizes.value_heads // sizes.key_heads
    q, k = (_unit(x.unflatten(1, (sizes.key_heads, -1))).repeat_interleave(group, 1) for x in (q, k))
    v = v.unflatten(1, (sizes.value_heads, -1))
    rates, decays = gates.chunk(2, dim=-1)
    rates = rates.sigmoid()
    decays = rule.decay * F.softplus(decays + rule.dt_bias)
    compute = _token_by_token if len(rows) < _LEAST else _in_chunks
    return compute(q * sizes.key_dim**-0.5, k, v, decays, rates, state)


def _unit(x: Tensor) -> Tensor:
    """Return vectors along the last axis with a length of 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON)


def _token_by_token(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor, state: Tensor) -> Tensor:
    """Return `[tokens, heads, value_dim]`; q, k and v `[tokens, heads, dim]`, logarithmic decays `[tokens, heads]`."""
    out = torch.empty_like(v)
    for token, decay in enumerate(decays.exp()):
        state *= decay[:, None, None]
        key = k[token].unsqueeze(-1)
        change = rates[token].unsqueeze(-1) * (v[token] - (state * key).sum(1))
        state += key * change.unsqueeze(1)
        out[token] = (state * q[token].unsqueeze(-1)).sum(1)
    return out


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor, state: Tensor) -> Tensor:
    """Do what `_token_by_token` does, CHUNK tokens at a time."""
    parts = [x.transpose(0, 1).split(CHUNK, dim=1) for x in (q, k, v, decays, rates)]  # [heads, tokens, ...]
    return torch.cat([_chunk(state, *part) for part in zip(*parts, strict=True)], dim=1).transpose(0, 1)


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
    """Return `[heads, tokens, value_dim]` of one chunk.

    With D_ts the decay from token s to t, what token t writes is u_t = b_t (v_t - D_t0 S^T k_t - the sum over s < t of
    D_ts (k_t k_s) u_s): a triangular system.
    """
    total = decays.double().cumsum(1)  # behind a large one, the differences of others would be lost
    between = (total.unsqueeze(2) - total.unsqueeze(1)).float().tril().exp().tril()  # [heads, t, s]
    from_start, rates = total.float().exp().unsqueeze(2), rates.unsqueeze(2)
    system = rates * between * (k @ k.mT)
    wanted = rates * (v - from_start * (k @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = from_start * (q @ state) + (between * (q @ k.mT)) @ written
    to_end = (total[:, -1:] - total).float().exp().unsqueeze(2)
    state *= from_start[:, -1:]
    state += (to_end * k).mT @ written
    return out
