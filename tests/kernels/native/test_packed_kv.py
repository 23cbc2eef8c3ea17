"""Keys and values packed in 12 bits: they come back bit for bit, and attention to them has the bits of plain blocks."""

import pytest
import torch

from offload.architecture.dims import Dimensions
from offload.architecture.kv_formats import BLOCK
from offload.kernels.native.calls import BlockCalls
from offload.kernels.native.checks import InvalidCall
from offload.kernels.native.kernel import find_kernel
from offload.kernels.native.kv_groups import Groups, kv_format
from offload.kernels.native.packed_kv import RUN_BLOCKS, pack_call, unpack_call
from offload.settings.kv_formats import KV_FORMATS, PACKED_KV
from tests.kernels.native.test_tree import random_tree
from tests.support.native_kernel import NAN, attention, draw, fill_blocks

pytestmark = pytest.mark.xdist_group("native")

RUN, PATCHES, run_bytes = PACKED_KV.run, 30, PACKED_KV.run_bytes
NOT_FINITE = [x for x in range(1 << 16) if x >> 7 & 255 == 255]


def bits(x):
    return x.view(torch.int16)


def pack(blocks, count):
    """Return the first `count` runs of blocks `[heads, blocks, 32 * dim]`, items, and which fit `[heads, runs]`."""
    heads, dim = len(blocks), blocks.shape[2] // 32
    runs = torch.full((heads, count, run_bytes(dim)), 255, dtype=torch.uint8)
    own = torch.arange(count * RUN_BLOCKS).view(count, RUN_BLOCKS)
    items = torch.tensor([[h, r, *own[r].tolist()] for h in range(heads) for r in range(count)], dtype=torch.int32)
    fits = torch.full((len(items),), 9, dtype=torch.uint8)
    find_kernel("portable").pack_runs(pack_call(blocks, runs, items, fits))
    return runs, items, fits.view(heads, count)


def unpack(runs, items, like, plane=False):
    found = torch.zeros_like(like)
    find_kernel("portable").pack_runs(unpack_call(runs, items, found, plane))
    return found


def assert_lossless(keys, values):
    """Assert that runs of keys and values `[heads, tokens, dim]` fit, and come back bit for bit."""
    blocks = fill_blocks(keys, values)
    runs, items, fits = pack(blocks, keys.shape[1] // RUN)
    assert fits.all()
    assert torch.equal(bits(unpack(runs, items, blocks)), bits(blocks))


def test_each_of_the_65_536_values_comes_back():
    window = torch.arange(4096)  # sign, 16 exponents, mantissa
    window = (window & 2048) << 4 | window & 2047
    windows = window + (torch.arange(16) << 11)[:, None]  # [16, 4096]
    windows[15] = torch.where(windows[15] >> 7 & 255 == 255, 0x7F00, windows[15])  # those that are not finite: below
    runs = windows.to(torch.int16).view(torch.bfloat16).view(16, 32, RUN).transpose(1, 2)
    assert_lossless(runs, runs.flip(0))
    others = torch.tensor(NOT_FINITE).to(torch.int16).view(torch.bfloat16)
    keys, values = torch.ones(2, 9 * RUN, 32).bfloat16().unbind()
    for at, some in enumerate(others.split(PATCHES)):
        where = torch.randperm(RUN * 32, generator=torch.Generator().manual_seed(at))[: len(some)]
        (keys, values)[at % 2][at * RUN : (at + 1) * RUN].view(-1)[where] = some
    assert_lossless(keys[None], values[None])


@pytest.mark.parametrize(("dim", "patches"), [(32, 0), (64, PATCHES), (512, PATCHES + 1)])
def test_a_run_with_too_many_patches_is_not_packed(dim, patches):
    keys, values = ((draw(1, RUN, dim, seed=n) * draw(1, 1, dim, seed=n + 2).exp()).bfloat16() for n in (0, 1))
    both = torch.stack((keys, values)).abs().clamp(0.1, 3)
    where = torch.randperm(2 * RUN * dim, generator=torch.Generator().manual_seed(0))[:patches]
    both.view(-1)[where] = 1e-20
    blocks = fill_blocks(*both.unbind())
    runs, items, fits = pack(blocks, 1)
    assert fits.item() == (patches <= PATCHES)
    assert torch.equal(unpack(runs, items, blocks), blocks) == (patches <= PATCHES)


def test_plane_a_is_off_by_half_a_step_at_most_and_not_to_one_side():
    keys, values = ((draw(1, RUN, 64, seed=n) * 9).bfloat16() for n in (0, 1))
    keys[0, 3, 5], values[0, 4, 6] = NAN, 1e30  # patches are exact
    blocks = fill_blocks(keys, values)
    runs, items, _ = pack(blocks, 1)
    found, given = unpack(runs, items, blocks, plane=True).float(), blocks.float()
    usual = given.isfinite() & (given.abs() < 1e29)
    relative = (found[usual] - given[usual]) / given[usual]
    assert relative.abs().max() <= 2**-4
    assert relative.mean().abs() < 0.005  # half a step of bf16; without that of plane A it would be 0.04
    assert torch.equal(found[~usual].nan_to_num(7), given[~usual].nan_to_num(7))


# Keys that the first query sees, queries, head size, query heads of a KV head.
CASES = [(128, 1, 64, 1), (700, 1, 128, 4), (1003, 22, 64, 3), (545, 5, 96, 1), (290, 70, 32, 2), (256, 1, 512, 1)]


def packed_prefix(seen, tokens, dim, group, kind="packed", heads=2):
    """Return queries, plain blocks, and the same keys and values of which most runs are packed.

    Those are blocks whose packed ones are NaN, a table, and groups. Some keys and values are outliers.
    """
    q = draw(tokens, heads * group, dim).bfloat16()
    keys, values = (draw(heads, seen + tokens, dim, seed=n).bfloat16() for n in (1, 2))
    keys[:, 9::200, 3], values[:, 40::150, 1] = 1e-25, 60000
    plain = fill_blocks(keys, values)
    runs, items, fits = pack(plain, (seen + tokens) // RUN)
    table = torch.arange(plain.shape[1], dtype=torch.int32).repeat(heads, 1)
    rest = plain.clone()
    unpacked = unpack(runs, items, plain[:, : runs.shape[1] * RUN_BLOCKS].contiguous(), kind == "plane")
    for head, run, *own in items.tolist():
        if (head + run) % 4 == 3:
            continue
        assert fits[head, run]
        table[head, own] = ~table[head, own]
        rest[head, own] = NAN
        plain[head, own] = unpacked[head, own]
    return q, plain, rest, table, Groups(runs[..., : KV_FORMATS[kind].run_bytes(dim)].contiguous(), kv_format(kind))


def assert_equal(found, expected):
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["packed", "plane"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_has_the_bits_of_plain_blocks(kernel, set_threads, case, kind):
    seen = case[0]
    q, plain, rest, table, groups = packed_prefix(*case, kind)
    set_threads(1)
    expected = attention(kernel, q, plain, seen)
    set_threads(3)
    assert_equal(attention(kernel, q, rest, seen, table, groups=groups), expected)


@pytest.mark.parametrize("kind", ["packed", "plane"])
def test_packed_blocks_are_read_in_any_order(kernel, kind):
    q, plain, rest, table, groups = packed_prefix(1024, 4, 64, 3, kind)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:37]
    chosen = torch.arange(plain.shape[1], dtype=torch.int32).repeat(2, 1)[:, order].contiguous()
    expected = attention(kernel, q, plain, 37 * 16, chosen, causal=False)
    found = attention(kernel, q, rest, 37 * 16, table[:, order].contiguous(), causal=False, groups=groups)
    assert_equal(found, expected)


@pytest.mark.parametrize(("start", "left_out"), [(511, 0), (640, 0), (700, 0), (640, 1), (649, 1)])
def test_a_tree_follows_a_packed_prefix(kernel, start, left_out):
    """Where a selection leaves an odd number of blocks out, some in the tree's first span are packed, and some not."""
    q, plain, rest, table, groups = packed_prefix(start, 40, 64, 3)
    table[:, start // RUN * RUN_BLOCKS :] = torch.arange(table.shape[1], dtype=torch.int32)[start // RUN * RUN_BLOCKS :]
    rest[:, start // RUN * RUN_BLOCKS :] = plain[:, start // RUN * RUN_BLOCKS :]
    parents = random_tree(40, start)
    order = torch.arange(left_out, table.shape[1], dtype=torch.int32).repeat(len(table), 1)
    table, seen = table[:, left_out:].contiguous(), start + 1 - left_out * BLOCK
    expected = attention(kernel, q, plain, seen, order, parents=parents)
    assert_equal(attention(kernel, q, rest, seen, table, parents=parents, groups=groups), expected)


def test_what_cannot_be_packed_is_refused():
    blocks, fits = torch.zeros(1, 8, 32 * 80).bfloat16(), torch.zeros(1, dtype=torch.uint8)
    items = torch.tensor([[0, 0, *range(8)]], dtype=torch.int32)
    with pytest.raises(InvalidCall, match="multiple of 32"):
        pack_call(blocks, torch.zeros(1, 1, run_bytes(80), dtype=torch.uint8), items, fits)
    shape = Dimensions(1, 64, 1, 1, 64, 64, 64, True)
    groups = Groups(torch.zeros(1, 1, run_bytes(64), dtype=torch.uint8), kv_format("packed"))
    with pytest.raises(InvalidCall, match="bf16"):
        BlockCalls(shape, 8).attention(
            torch.zeros(1, 8, 2048), torch.zeros(1, 1, 64), 9, table=torch.zeros(1, 8, dtype=torch.int32), groups=groups
        )
