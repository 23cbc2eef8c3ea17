"""Triton's attention to packed keys and values: it has the bits of attention to them as they are."""

import sys

import pytest
import torch

from offload.kernels.packed_kv import unpack_runs
from offload.kernels.triton import ops
from offload.settings.kv_formats import PLANE_KV
from tests.support.native_kernel import packed_runs
from tests.support.triton_compiler import compile_all

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUN = 128


def drawn(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def bits(x):
    return x.contiguous().view(torch.int16)


def numbers(kv_heads, runs, dim, wild=0, seed=0):
    """Return keys and values `[kv_heads, tokens, dim]`: of the first `wild` runs any bits, which do not fit.

    Of the others, some numbers are zeros, infinities, NaN with any bits, subnormal or large.
    """
    generator = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(1 << 15), 1 << 15, (2, kv_heads, runs * RUN, dim), generator=generator).to(torch.int16)
    usual = torch.randn(any_bits.shape, generator=generator) * torch.randn(2, kv_heads, 1, dim, generator=generator)
    is_any = torch.rand(any_bits.shape, generator=generator) < 15 / (2 * RUN * dim)
    is_any[:, :, : wild * RUN] = True
    return torch.where(is_any, any_bits, usual.bfloat16().view(torch.int16)).view(torch.bfloat16).to(DEVICE)


def stored(keys, values):
    """Return memory as `attend_runs` takes it: runs that fit packed, others plain, in another order."""
    heads, tokens, dim = keys.shape
    each = [x.view(heads, -1, RUN, dim) for x in (keys, values)]
    runs, fits = packed_runs(*(x.flatten(0, 1) for x in each))
    runs[~fits] = 255
    order = torch.arange(tokens // RUN - 1, -1, -1, device=DEVICE)
    places = torch.where(fits.view(heads, -1), ~order, order).to(torch.int32)
    plain = [torch.full_like(x, float("nan")) for x in each]
    for x, source in zip(plain, each, strict=True):
        x[:, order] = torch.where(fits.view(heads, -1, 1, 1), float("nan"), source)
    return (runs.view(heads, len(order), -1)[:, order].contiguous(), places, *(x.flatten(1, 2) for x in plain)), fits


@pytest.mark.daily("96")
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_any_bits_come_back(dim):
    """Also of parts of runs; those that do not fit are plain."""
    keys, values = numbers(2, 3, dim, wild=1)
    memory, fits = stored(keys, values)
    assert not fits.view(2, 3)[:, 0].any() and fits.sum() >= 2
    rows, starts = torch.tensor([1, 0]), torch.tensor([0, 120])
    for size in (17, 200):
        found = ops.unpack_runs(memory, rows.to(DEVICE), starts.to(DEVICE), size)
        for own, x in zip(found, (keys, values), strict=True):
            wanted = [x[row, start : start + size] for row, start in zip(rows, starts, strict=True)]
            assert torch.equal(bits(own), bits(torch.stack(wanted)))


@pytest.mark.daily("96")
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_runs_have_the_bytes_of_the_native_kernels(dim):
    """From a ring, in which they begin in the middle; a channel without a number that can be coded has a base."""
    keys, values = numbers(2, 2, dim, seed=4)
    keys[0, :RUN, 5] = float("inf")
    values[1, 130, :4] = torch.tensor([0.0, -0.0, 1e-40, 3e38])
    wanted, fits = packed_runs(*(x.view(4, RUN, dim) for x in (keys, values)))
    runs = torch.zeros((2, 5, wanted.shape[1]), dtype=torch.uint8, device=DEVICE)
    found = ops.pack_runs(*(x.roll(RUN, 1) for x in (keys, values)), runs, 1, 2, 2)
    assert torch.equal(found.flatten().bool(), fits) and 2 <= fits.sum() < 4
    assert torch.equal(runs[:, 1:3].flatten(0, 1)[fits], wanted[fits])


SHAPES = [  # tokens, heads, kv_heads, head_dim, seen, causal
    (1, 1, 1, 32, 100, False),
    (5, 8, 2, 128, 300, True),
    (20, 4, 2, 96, 257, True),
    (2, 2, 1, 256, 130, True),
]


@pytest.mark.daily("*300*")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_has_the_bits_of_plain_keys(shape):
    """Patches among them, runs as they are, and the last one under way."""
    tokens, heads, kv_heads, dim, seen, causal = shape
    keys, values = numbers(kv_heads, 3, dim, wild=1)
    keys, values = (x.nan_to_num(0, 0, 0).clamp(-3, 3) for x in (keys, values))
    keys[:, 150:160, 3] = torch.tensor([0.0, 1e-30, -1e-20, 60.0, -0.0, 1e-40, 1e-10, -60.0, 1e-6, 50.0])
    memory, fits = stored(keys, values)
    assert 0 < fits.sum() < len(fits) or kv_heads != 1
    q = drawn(tokens, heads, dim, seed=3)
    states = [ops.new_state(q, 3) for _ in range(3)]
    ops.attend(q, keys, values, states[0], seen, causal)
    ops.attend_runs(q, *memory, states[1], seen, causal)
    assert torch.equal(states[0], states[1])
    if causal:
        ops.attend_runs(q, *memory, states[2], 0, length=torch.tensor([seen], device=DEVICE))
        assert torch.equal(states[0], states[2])


def test_plane_a_alone_is_attended_to_as_it_decodes():
    keys, values = numbers(2, 2, 64)
    keys, values = (x.nan_to_num(0, 0, 0).clamp(-3, 3) for x in (keys, values))
    memory, fits = stored(keys, values)
    assert fits.all()
    drafts = [x.reshape(2, 2 * RUN, 64) for x in unpack_runs(memory[0].flip(1).flatten(0, 1), 64, plane=True)]
    q = drawn(3, 4, 64)
    states = [ops.new_state(q, 2) for _ in range(2)]
    ops.attend(q, *drafts, states[0], 200)
    planes = memory[0][..., : PLANE_KV.run_bytes(64)].contiguous()
    ops.attend_runs(q, planes, *memory[1:], states[1], 200)
    assert torch.equal(*states) and not torch.equal(*(bits(x) for x in (drafts[0], keys)))


linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels")


@linux
def test_types_agree_in_every_branch_of_the_kernels():
    """The interpreter does not check types."""
    sizes = {"GROUP": 4, "HEAD_DIM": 96, "WIDEN": False, "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 128}
    plain = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "keys_ptr", "values_ptr"), "*bf16")
    types = plain | {"runs_ptr": "*u8", "places_ptr": "*i32", "seen_ptr": "*i64", "state_ptr": "*fp32", "scale": "fp32"}
    options = [{"CAUSAL": True, "HAS_SEEN": True, "PLANE": False}, {"CAUSAL": False, "HAS_SEEN": False, "PLANE": True}]
    unpacking = types | {"rows_ptr": "*i64", "starts_ptr": "*i64"}, {"HEAD_DIM": 96, "BLOCK_D": 128, "HAS_VALUES": True}
    jobs = [("attend_runs_kernel", types, sizes | each) for each in options]
    compile_all("packed_kv", [*jobs, ("unpack_kernel", *unpacking)])
    packing = types | {"fits_ptr": "*u8"}, {"HEAD_DIM": 96, "BLOCK_D": 128}
    compile_all("pack_runs", [("pack_kernel", *packing)])
