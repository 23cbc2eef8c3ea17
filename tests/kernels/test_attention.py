"""attend, attend_causal and merge against softmax attention in fp64 over all keys at once."""

import itertools

import pytest
import torch

from offload.kernels.attention import (
    Partial,
    attend,
    attend_by_blocks,
    attend_causal,
    attend_reference,
    merge,
    received_attention,
)


def draw(*size, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inputs(tokens, keys, heads=6, kv_heads=2, head_dim=64, dtype=torch.float32, scale=1.0):
    return (
        draw(tokens, heads, head_dim, dtype=dtype, seed=1, scale=scale),
        draw(kv_heads, keys, head_dim, dtype=dtype, seed=2),
        draw(kv_heads, keys, head_dim, dtype=dtype, seed=3),
    )


def definition(q, k, v, causal):
    """out `[tokens, heads, head_dim]` and lse `[tokens, heads]` in fp64; causal: the last keys are the queries' own."""
    tokens, keys = len(q), k.shape[1]
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hkd->thk", q.double(), k) / q.shape[-1] ** 0.5
    if causal:
        future = torch.arange(keys)[None] > torch.arange(tokens)[:, None] + keys - tokens
        scores = scores.masked_fill(future[:, None], float("-inf"))
    return torch.einsum("thk,hkd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def assert_close(partial, expected, tolerance):
    out, lse = expected
    assert (partial.out.double() - out).abs().max() < tolerance
    assert (partial.lse.double() - lse).abs().max() < tolerance


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (8, 1)])
def test_partials_equal_the_definition(head_dim, heads, kv_heads):
    for tokens, keys in ((1, 1), (1, 700), (5, 33), (40, 257)):
        q, k, v = inputs(tokens, keys, heads, kv_heads, head_dim)
        assert_close(attend(q, k, v), definition(q, k, v, causal=False), 1e-4)
    for tokens, keys in ((37, 37), (37, 100), (1, 100), (2, 3)):
        q, k, v = inputs(tokens, keys, heads, kv_heads, head_dim)
        assert_close(attend_causal(q, k, v), definition(q, k, v, causal=True), 1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("tokens", "keys"), [(37, 37), (37, 100), (130, 1000), (2, 3)])
def test_a_gpus_causal_mask_is_aligned_with_the_last_key(tokens, keys):
    q, k, v = (x.cuda() for x in inputs(tokens, keys, dtype=torch.bfloat16))
    expected = definition(*(x.cpu() for x in (q, k, v)), causal=True)
    assert_close(Partial(*(x.cpu() for x in attend_causal(q, k, v))), expected, 3e-2)


def test_blocks_of_keys_are_merged_where_no_kernel_serves():
    """Also where one logit outweighs all others by far."""
    for scale in (1.0, 1e3):
        q, k, v = (draw(2, 3, count, 64, seed=seed, scale=scale) for seed, count in ((1, 5), (2, 100), (3, 100)))
        for ours, theirs in zip(attend_by_blocks(q, k, v, 17), attend_reference(q, k, v, False), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("borders", [(), (1,), (99,), (10, 11, 60), tuple(range(1, 100, 7))])
def test_any_split_of_the_keys_merges_to_the_whole(borders, dtype, tolerance):
    q, k, v = inputs(20, 120, dtype=dtype)
    edges = [0, *borders, 100]
    prefix = [attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)]
    merged = merge([attend_causal(q, k[:, 100:], v[:, 100:]), *prefix])
    assert merged.out.dtype == dtype
    assert_close(merged, definition(q, k, v, causal=True), tolerance)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 90), (5, 5), (17, 64)])
def test_received_attention_is_the_sum_of_the_softmax_weights(tokens, keys):
    q, k, _ = inputs(tokens, keys)
    identity = torch.eye(keys).expand(len(k), -1, -1)  # as values: the output is the weights
    weights, lse = definition(q, k, identity, True)
    found = received_attention(q, k, lse.float())
    torch.testing.assert_close(found.double(), weights.unflatten(1, (len(k), -1)).sum((0, 2)), rtol=1e-5, atol=1e-6)
