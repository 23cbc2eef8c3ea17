"""Packing by torch writes the native kernel's bytes, and reads them back bit for bit."""

import pytest
import torch

from offload.kernels.native.layout import keys_of, values_of
from offload.kernels.packed_kv import pack_runs, unpack_runs
from tests.kernels.native.test_packed_kv import bits, pack, unpack
from tests.support.native_kernel import draw, fill_blocks


@pytest.mark.parametrize("dim", [32, 96, 128])
def test_the_bytes_are_the_native_kernel_s(dim):
    keys, values = ((draw(3, 128, dim, seed=n) * (3 * draw(3, 1, dim, seed=n + 2)).exp()).bfloat16() for n in (0, 1))
    keys[0, ::9, 3], keys[1, 5], values[0, 9, 0], values[1, :, 1] = 1e30, 0, float("nan"), 1e-40
    keys[2, :, :5] *= torch.tensor([1e-30, 1e30]).repeat(64)[:, None].bfloat16()  # does not fit
    blocks = fill_blocks(keys, values)
    runs, items, fits = pack(blocks, 1)
    found, found_fits = pack_runs(keys, values)
    assert torch.equal(found_fits, fits.bool().flatten())
    assert found_fits.tolist().count(False) < 3 and not found_fits[2]
    fitting = found_fits.nonzero().flatten()
    assert torch.equal(found[fitting], runs[fitting, 0])
    for plane in (False, True):
        given = unpack(runs, items[fitting], blocks, plane)[fitting]
        ours = unpack_runs(found[fitting], dim, plane)
        for one, other in zip(ours, (keys_of(given, dim), values_of(given, dim)), strict=True):
            assert torch.equal(bits(one), bits(other.flatten(1, 2).contiguous()))
    for one, other in zip(unpack_runs(found[fitting], dim), (keys, values), strict=True):
        assert torch.equal(bits(one), bits(other[fitting]))
