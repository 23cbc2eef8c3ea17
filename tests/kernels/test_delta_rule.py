"""The gated delta rule against its definition in fp64: token by token, in chunks, and by the native kernel."""

import pytest
import torch
import torch.nn.functional as F

from offload.api.diagnosis import kernel_state
from offload.architecture.dims import LinearAttention
from offload.kernels.delta_rule import DeltaRule, run_delta_rule
from offload.kernels.native import find_kernel

SIZES = LinearAttention(key_heads=2, value_heads=4, key_dim=16, value_dim=48, kernel=4, layers=1)
NATIVE = kernel_state("auto")["levels"]


@pytest.fixture(params=[None, *NATIVE])
def kernel(request):
    return request.param and find_kernel(request.param)


def random_rule(seed=0):
    random = torch.Generator().manual_seed(seed)
    conv = torch.randn(SIZES.kernel, SIZES.width, generator=random)
    decay = -torch.rand(SIZES.value_heads, generator=random)
    return DeltaRule(SIZES, conv, decay, torch.randn(SIZES.value_heads, generator=random))


def random_inputs(count, seed=0):
    """The rows and gates of so many tokens."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, SIZES.width, generator=random)
    return rows, torch.randn(count, 2 * SIZES.value_heads, generator=random)


def empty():
    """The inputs before the first token, and the state there."""
    state = torch.zeros(SIZES.value_heads, SIZES.key_dim, SIZES.value_dim)
    return torch.zeros(SIZES.kernel - 1, SIZES.width), state


def by_definition(rule, rows, gates):
    """Compute all outputs and the last state in fp64, one number after the other as the definition has them."""
    conv, decay, bias = (x.double() for x in rule[1:])
    rows, gates = rows.double(), gates.double()
    padded = F.pad(rows, (0, 0, SIZES.kernel - 1, 0))
    state = torch.zeros(SIZES.value_heads, SIZES.key_dim, SIZES.value_dim, dtype=torch.float64)
    out = []
    for token in range(len(rows)):
        x = F.silu((padded[token : token + SIZES.kernel] * conv).sum(0))
        q, k, v = x.split((SIZES.keys, SIZES.keys, SIZES.values))
        heads = []
        for head in range(SIZES.value_heads):
            at = slice(head // 2 * SIZES.key_dim, (head // 2 + 1) * SIZES.key_dim)
            query, key = (y[at] / (y[at].square().sum() + 1e-6).sqrt() for y in (q, k))
            value = v[head * SIZES.value_dim : (head + 1) * SIZES.value_dim]
            rate = gates[token, head].sigmoid()
            decayed = (
                state[head] * (decay[head] * F.softplus(gates[token, SIZES.value_heads + head] + bias[head])).exp()
            )
            state[head] = decayed + torch.outer(key, rate * (value - decayed.T @ key))
            heads.append(state[head].T @ query * SIZES.key_dim**-0.5)
        out.append(torch.stack(heads))
    return torch.stack(out), state


@pytest.mark.parametrize(
    ("count", "dtype", "decay"),
    [
        (1, torch.float32, 1),
        (15, torch.bfloat16, 1),
        (16, torch.float32, 1),
        (64, torch.float32, 300),
        (150, torch.float32, 1),
    ],
)
def test_all_ways_compute_the_definition(count, dtype, decay, kernel):
    """Also of inputs in bf16, and of decays to nothing, which must not overflow."""
    rule, (rows, gates) = random_rule(), random_inputs(count)
    rule, rows = rule._replace(decay=decay * rule.decay), rows.to(dtype)
    expected, last = by_definition(rule, rows, gates)
    before, state = empty()
    found = run_delta_rule(rule, before.to(dtype), rows, gates, state, kernel)
    assert (found - expected).abs().max() < 1e-4
    assert (state - last).abs().max() < 1e-4


def test_tokens_go_on_from_the_state_and_the_inputs_before(kernel):
    rule, (rows, gates) = random_rule(), random_inputs(150)
    expected, last = by_definition(rule, rows, gates)
    before, state = empty()
    every, found = torch.cat((before, rows)), []
    for first, end in ((0, 2), (2, 3), (3, 90), (90, 150)):
        found.append(run_delta_rule(rule, every[first : first + 3], rows[first:end], gates[first:end], state, kernel))
    assert (torch.cat(found) - expected).abs().max() < 1e-4
    assert (state - last).abs().max() < 1e-4
    if kernel is not None:  # in the same bits as one pass
        before, other = empty()
        assert torch.equal(run_delta_rule(rule, before, rows, gates, other, kernel), torch.cat(found))
        assert torch.equal(state, other)
