"""Attention to quantised keys and values at every level: that to dequantised ones, in the same bits in any company."""

import pytest
import torch

from offload.architecture.kv_formats import GROUP
from offload.kernels.native.kernel import find_kernel
from offload.kernels.native.kv_groups import Groups, dequantize_call, kv_format, quantize_call
from offload.settings.kv_formats import KV_FORMATS
from tests.support.native_kernel import DTYPES, NAN, attention, definition, distance, draw, fill_blocks

pytestmark = pytest.mark.xdist_group("native")

KIND = "q8"
# Keys before the first query, queries, head size, query heads of a KV head, groups that are quantised.
CASES = [
    (33, 1, 64, 3, range(1)),
    (100, 5, 80, 1, range(3)),
    (96, 33, 128, 4, range(1, 3)),
    (513, 8, 64, 3, range(1, 16)),
    (530, 25, 16, 7, range(16)),
    (700, 12, 512, 2, [1, 2, 3, 7, 15, 16]),
    (1100, 64, 32, 1, range(1, 32)),
]


def quantized(kernel, blocks, dim, chosen):
    """Return chosen groups, quantised, and their keys and values `[kv_heads, count, 32, head_dim]` in fp32."""
    heads, count, _ = blocks.shape
    groups = Groups(
        torch.full((heads, count // 2, KV_FORMATS[KIND].run_bytes(dim)), 255, dtype=torch.uint8), kv_format(KIND)
    )
    items = torch.tensor([(head, 2 * g, g) for head in range(heads) for g in chosen], dtype=torch.int32)
    kernel.quantize(quantize_call(blocks, groups, items, dim))
    both = tuple(torch.full((len(items), GROUP, dim), NAN) for _ in range(2))
    kernel.quantize(dequantize_call(groups, items, *both))
    return groups, [x.unflatten(0, (heads, len(chosen))) for x in both]


def make(kernel, case, dtype, scale=1.0, seed=0):
    """Return queries, blocks whose quantised ones are NaN, their table and groups, and the keys and values in all."""
    seen, tokens, dim, group, chosen = case
    q = draw(tokens, 2 * group, dim, seed=seed).to(dtype)
    k, v = (scale * draw(2, seen + tokens - 1, dim, seed=seed + n) for n in (1, 2))
    k += 3 * scale * draw(2, 1, dim, seed=seed + 3)  # channels have an offset of their own
    k, v = k.to(dtype), v.to(dtype)
    blocks = fill_blocks(k, v)
    groups, (keys, values) = quantized(kernel, blocks, dim, chosen)
    k, v = k.float(), v.float()
    table = torch.arange(blocks.shape[1], dtype=torch.int32).repeat(2, 1)
    for index, at in enumerate(chosen):
        some = slice(at * GROUP, (at + 1) * GROUP)
        k[:, some], v[:, some] = keys[:, index], values[:, index]
        table[:, 2 * at : 2 * at + 2] = ~table[:, 2 * at : 2 * at + 2]
        blocks[:, 2 * at : 2 * at + 2] = NAN
    return q, blocks, table, groups, k, v


def as_bytes(kernel):
    """Return whether codes are multiplied as bytes with bf16 queries, not as bf16."""
    return kernel.level == "avx512"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_attention_to_the_dequantised(kernel, case, dtype):
    q, blocks, table, groups, k, v = make(kernel, case, dtype)
    out, lse = attention(kernel, q, blocks, case[0], table, groups=groups)
    expected, expected_lse = definition(q, k, v, case[0])
    assert distance(out, expected) < (1e-5 if dtype == torch.float32 else 1.5e-3 if as_bytes(kernel) else 3e-3)
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_rows_gives_the_same_rows(kernel, set_threads, dtype):
    q, blocks, table, groups, _, _ = make(kernel, CASES[-1], dtype)
    set_threads(3)
    whole = attention(kernel, q, blocks, CASES[-1][0], table, groups=groups)
    set_threads(1)
    for first, count in ((0, 1), (1, 2), (3, 17), (20, 33), (63, 1)):
        some = slice(first, first + count)
        found = attention(kernel, q[some], blocks, CASES[-1][0] + first, table, groups=groups)
        assert all(torch.equal(one, other[some]) for one, other in zip(found, whole, strict=True))


def unusual(dtype, dim):
    """Yield blocks `[2, 6, 2 * 16 * dim]`: ordinary, equal, extreme numbers, ties, some not finite."""
    usual, sign = draw(2, 6, 32 * dim), draw(2, 6, 32 * dim, seed=1).sign()
    broken = usual.clone()
    broken[0, 1, 5], broken[1, 2, 7], broken[1, 4, -1] = NAN, float("inf"), -float("inf")
    scales = (20 * draw(2, 6, 32 * dim, seed=2)).exp()
    for x in (usual, usual * scales, usual * 1e-38, usual * 1e-40, sign * 3e38, sign * 0, broken):
        yield x.to(dtype)
    yield (usual * 4).round().to(dtype) / 2
    yield torch.full_like(usual, 1.7).to(dtype)


def test_no_number_is_further_from_its_own_than_half_a_step(kernel):
    """One that is not finite makes its own channel or token NaN, and no other."""
    k, v = (draw(2, 96, 64, seed=seed).bfloat16() for seed in (1, 2))
    k[0, :, 0], v[0, 7] = 100, -3  # a constant is kept
    k[1, 40, 3], v[1, 40, 3] = NAN, float("inf")
    _, found = quantized(kernel, fill_blocks(k, v), 64, range(3))
    for own, given, axis in zip(found, (k, v), (2, 3), strict=True):
        given = given.float().view(2, 3, GROUP, 64)
        lost = ~given.isfinite().all(axis, keepdim=True).expand_as(given)
        assert torch.equal(own.isnan(), lost) and lost.any()
        size = given.amax(axis, keepdim=True) - given.amin(axis, keepdim=True)
        assert (((own - given).abs() <= 0.6 * size / 255 + given.abs() / 256) | lost).all()
    assert torch.equal(found[0][0, :, :, 0], k[0, :, 0].float().view(3, GROUP))


@pytest.mark.daily("*-16-*", "*-80-*")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 80, 576])
def test_every_level_quantises_to_the_same_bits(kernel, library, dtype, dim):
    items = torch.tensor([(head, 2 * g, g) for head in range(2) for g in range(3)], dtype=torch.int32)
    for blocks in unusual(dtype, dim):
        found, expected = (
            torch.full((2, 3, KV_FORMATS[KIND].run_bytes(dim)), 255, dtype=torch.uint8) for _ in range(2)
        )
        for one, memory in ((kernel, found), (find_kernel("portable", library), expected)):
            one.quantize(quantize_call(blocks, Groups(memory, kv_format(KIND)), items, dim))
        assert torch.equal(found, expected)
