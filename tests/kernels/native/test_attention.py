"""The native kernel's attention at every level: what it is, in fp64, and that a row is the same in any company."""

import random
from functools import cache
from itertools import cycle, islice

import pytest
import torch

from offload.kernels.native import LEVELS, KernelUnavailable, find_kernel
from tests.support.native_kernel import DTYPES, attention, definition, distance, draw, fill_blocks, scatter_blocks

# One worker: the emulated levels, of processors that lack the real ones, are compiled once.

HEAD_DIMS = (16, 64, 80, 96, 128, 256, 576)
GROUPS = (1, 3, 4, 7, 8)
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 4999, 5000)
LENGTHS = (*BORDERS, *random.Random(0).sample(range(66, 2500), 5))
LARGEST_LOGIT = 1e4


def spread(values, seed):
    """A value for each length: all of them as often, in an order of their own."""
    chosen = list(islice(cycle(values), len(LENGTHS)))
    random.Random(seed).shuffle(chosen)
    return chosen


TOKENS = [min(tokens, 1 + 8000 // seen) for tokens, seen in zip(spread((1, 2, 3, 5, 8, 33), 3), LENGTHS, strict=True)]
KINDS = spread(("random", "peaked", "extreme"), 5)
CAUSAL, BY_TABLE = spread((True, True, False), 6), spread((True, False), 7)
SIZES = (spread(HEAD_DIMS, 1), spread(GROUPS, 2), TOKENS, spread((1, 2, 3), 4))
CASES = list(zip(LENGTHS, *SIZES, KINDS, CAUSAL, BY_TABLE, strict=True))


def inputs(tokens, group, kv_heads, keys, head_dim, dtype, kind="random", seed=0):
    """q, keys and values; peaked: one key outweighs all others, extreme: products of 10^4."""
    q = draw(tokens, kv_heads * group, head_dim, seed=seed)
    k, v = (draw(kv_heads, keys, head_dim, dtype=dtype, seed=seed + n) for n in (1, 2))
    if kind == "peaked":
        k[:, (keys - tokens) // 2] = 8 * q[0, ::group].to(dtype)
    if kind == "extreme":
        q *= LARGEST_LOGIT / torch.einsum("thgd,hkd->thgk", q.unflatten(1, (kv_heads, group)), k.float()).abs().max()
    return q.to(dtype), k, v


@cache
def expected(seen, causal, *size):
    """The definition's result for `inputs(*size)`, computed once for all levels."""
    return definition(*inputs(*size), seen, causal)


def assert_is_attention(found, reference, dtype, kind="random"):
    (out, lse), (expected_out, expected_lse) = found, reference
    # Where products of 10^4 cancel, fp32 has no more digits.
    limit = 3e-3 if dtype == torch.bfloat16 else 1e-4 if kind == "extreme" else 1e-5
    assert distance(out, expected_out) < limit
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


def same(one, other):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("seen", "head_dim", "group", "tokens", "kv_heads", "kind", "causal", "by_table"), CASES)
def test_it_is_attention(kernel, dtype, seen, head_dim, group, tokens, kv_heads, kind, causal, by_table):
    size = (tokens, group, kv_heads, seen + (tokens - 1) * causal, head_dim, dtype, kind)
    q, k, v = inputs(*size)
    blocks, table = fill_blocks(k, v), None
    if by_table:
        blocks, table = scatter_blocks(blocks)
    found = attention(kernel, q, blocks, seen, table, causal)
    assert_is_attention(found, expected(seen, causal, *size), dtype, kind)
    out, _ = attention(kernel, q, blocks, seen, table, causal, narrow=dtype == torch.bfloat16)
    assert torch.equal(out, found[0].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rise", [0.01, 0.1, 0.18, 1])
def test_scores_may_rise_from_key_to_key(kernel, dtype, rise):
    """By less than what rescales sums from one span to the next, by about as much, and by more."""
    q, k, v = inputs(2, 3, 1, 601, 64, dtype)
    q, k = q.abs() + 0.5, torch.arange(601)[None, :, None] * torch.ones(1, 1, 64)
    k = (k * rise * 8 / q.float().mean() / 64).to(dtype)
    found = attention(kernel, q, fill_blocks(k, v), 600)
    assert_is_attention(found, definition(q, k, v, 600), dtype, "extreme")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 80)])
def test_threads_and_company_change_no_bit(kernel, is_emulated, set_threads, dtype, group, head_dim):
    """1 to 64 rows for each KV head, within a call of 200, by one to three threads: bit for bit.

    Few rows are split over the threads by pieces of the keys, many by rows; 14 groups of rows are many for three.
    """
    tokens, seen = 200, 490  # crosses the border of a piece
    size = (tokens, group, 2, seen + tokens - 1, head_dim, dtype)
    q, k, v = inputs(*size)
    blocks, table = scatter_blocks(fill_blocks(k, v))
    set_threads(1)
    whole = out, lse = attention(kernel, q, blocks, seen, table)
    assert_is_attention(whole, expected(seen, True, *size), dtype)
    for count in (*range(1, 65, 7 if is_emulated or group > 1 else 1), tokens):
        set_threads(1 + count % 3)
        first = 7 * count % (tokens - count + 1)
        some = slice(first, first + count)
        assert same(attention(kernel, q[some], blocks, seen + first, table), (out[some], lse[some])), count


def damaged_inputs(tokens, seen, dtype, value, damaged, at):
    q, k, v = inputs(tokens, 3, 2, seen + tokens - 1, 64, dtype)
    if damaged == "q":
        q[-1] = float(value)
    else:
        (k if damaged == "k" else v)[:, at] = float(value)
    return q, k, v


@cache
def damage(*case):
    """Where the definition's outputs are finite, and where its lse is NaN."""
    out, lse = definition(*damaged_inputs(*case), case[1])
    return out[-1].isfinite(), lse[-1].isnan()


@pytest.mark.daily("*-7-*", "*-1-v-*", "*-50-k-*", "*-1-q-nan-*")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("damaged", ["q", "k", "v"])
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_what_is_no_number_stays_none(kernel, dtype, value, damaged, tokens):
    """Damaged weights must not end as text: neither the running maximum nor the fold of pieces may hide them."""
    seen = 1100  # three pieces; 150 rows are three groups
    for at in (0, 700, seen - 1):  # a key in the first piece, in the second, the newest
        case = tokens, seen, dtype, value, damaged, at
        q, k, v = damaged_inputs(*case)
        out, lse = attention(kernel, q, fill_blocks(k, v), seen)
        finite, undefined = damage(*case)
        assert not out[-1].isfinite()[~finite].any()
        assert not finite.all(), "the definition says so too"
        assert not lse[-1].isfinite()[undefined].any()


def test_the_best_level_is_taken_and_an_unknown_one_refused():
    try:
        best = find_kernel()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    for level in LEVELS[: LEVELS.index(best.level)]:
        with pytest.raises(KernelUnavailable, match=f"no {level}"):
            find_kernel(level)
    assert find_kernel("portable").level == "portable"
    with pytest.raises(KernelUnavailable, match="no abacus"):
        find_kernel("abacus")


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(KernelUnavailable, match=r"not loaded: .*nothing\.so"):
        find_kernel("auto", tmp_path / "nothing.so")
