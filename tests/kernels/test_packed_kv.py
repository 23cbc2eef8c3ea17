"""Unpacking by torch is that of the native kernel, bit for bit."""

import pytest
import torch

from offload.kernels.native.layout import keys_of, values_of
from offload.kernels.packed_kv import unpack_runs
from tests.kernels.native.test_packed_kv import bits, pack, unpack
from tests.support.native_kernel import draw, fill_blocks


@pytest.mark.parametrize("dim", [32, 96])
def test_unpacked_numbers_are_the_native_kernels(dim):
    keys, values = ((draw(2, 128, dim, seed=n) * (3 * draw(2, 1, dim, seed=n + 2)).exp()).bfloat16() for n in (0, 1))
    keys[0, ::9, 3], keys[1, :, 5], values[0, 9, 0], values[1, :, 1] = 1e30, 0, float("nan"), 1e-40
    blocks = fill_blocks(keys, values)
    runs, items, fits = pack(blocks, 1)
    assert fits.all()
    for plane in (False, True):
        given = unpack(runs, items, blocks, plane)
        for found, of in zip(unpack_runs(runs[:, 0], dim, plane), (keys_of, values_of), strict=True):
            assert torch.equal(bits(found), bits(of(given, dim).flatten(1, 2).contiguous()))
    for found, wanted in zip(unpack_runs(runs[:, 0], dim), (keys, values), strict=True):
        assert torch.equal(bits(found), bits(wanted))
