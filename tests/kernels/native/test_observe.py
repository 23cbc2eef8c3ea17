"""The attention that keys receive, by the native kernel at every level, against the definition in fp64."""

import pytest
import torch

from offload.architecture.dims import Dimensions
from offload.kernels.native.calls import BlockCalls
from tests.support.native_kernel import DTYPES, attention, draw, fill_blocks, scatter_blocks

CASES = [  # tokens, group, kv_heads, keys before, head_dim, by table
    (1, 1, 1, 0, 16, False),
    (1, 3, 2, 700, 64, True),
    (7, 8, 1, 130, 80, False),
    (40, 3, 3, 517, 64, False),
    (128, 2, 2, 33, 128, True),
    (5, 4, 1, 1100, 512, False),
]
LIMIT = {torch.bfloat16: 2e-5, torch.float32: 1e-5}  # relative: scores are in fp32 either way


def inputs(tokens, group, kv_heads, before, head_dim, dtype):
    q = draw(tokens, kv_heads * group, head_dim, dtype=dtype)
    k, v = (draw(kv_heads, before + tokens, head_dim, dtype=dtype, seed=n) for n in (1, 2))
    return q, k, v


def definition(q, keys):
    """The causal softmax weights, the last keys being the queries' own, summed over the queries of each KV head."""
    tokens, count = len(q), keys.shape[1]
    grouped = q.double().unflatten(1, (len(keys), -1))
    scores = torch.einsum("thgd,hkd->thgk", grouped, keys.double()) / q.shape[2] ** 0.5
    later = torch.arange(count) > torch.arange(count - tokens, count)[:, None]
    return scores.masked_fill(later[:, None, None], float("-inf")).softmax(-1).sum((0, 2))


def observe(kernel, q, blocks, before, lse, received, table=None):
    kv_heads, group = len(blocks), q.shape[1] // len(blocks)
    shape = Dimensions(1, 64, kv_heads * group, kv_heads, q.shape[2], 64, 64, True)
    calls = BlockCalls(shape, blocks.shape[1])
    kernel.observe(calls.observation(blocks, q, before + 1, lse, received, table))
    return received


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_sum_of_the_softmax_weights(kernel, set_threads, dtype, case):
    """In the same bits with any number of threads."""
    *size, by_table = case
    before = size[3]
    q, k, v = inputs(*size, dtype)
    blocks, table = fill_blocks(k, v), None  # NaN behind the last key
    if by_table:
        blocks, table = scatter_blocks(blocks)
    out, lse = attention(kernel, q, blocks, before + 1, table)
    results = []
    for threads in (1, 3):
        set_threads(threads)
        results.append(received := torch.zeros(len(k), before + len(q) + 3))
        received[:, :1] = 1
        observe(kernel, q, blocks, before, lse, received, table)
    assert torch.equal(*results)
    wanted = definition(q, k)
    assert (received[:, -3:] == 0).all(), "nothing behind the last key"
    received[:, :1] -= 1  # what was there is added to
    assert ((received[:, :-3] - wanted).norm() / wanted.norm()) < LIMIT[dtype]
    assert torch.equal(attention(kernel, q, blocks, before + 1, table)[0], out)
