"""Linears with quantised weights as a GPU has them, by torch's operations on a CPU, against fp64."""

import pytest
import torch

from offload.architecture.weight_formats import FORMATS
from offload.kernels import quantized_linear
from offload.kernels.device_weight import pack_for_device
from offload.kernels.quantized_linear import QuantizedLinear
from tests.support.native_kernel import distance, draw
from tests.support.quantized import WIDE_FORMATS, random_weight


@pytest.mark.parametrize("name", [*FORMATS, *WIDE_FORMATS])
def test_packing_keeps_every_value_and_takes_the_formats_bits(name):
    parts = [random_weight(name, outputs, 512, seed) for seed, outputs in enumerate((24, 7))]
    packed = pack_for_device([weight for weight, _ in parts])
    assert torch.equal(packed.unpacked(slice(None)).dequantized(), torch.cat([values for _, values in parts]))
    assert torch.equal(packed.unpacked(slice(20, 30)).dequantized(), torch.cat([values for _, values in parts])[20:30])
    size = sum(x.nbytes for x in packed.tensors() if x is not packed.levels)
    assert 8 * size == parts[0][0].format.bits_per_weight * 31 * 512


@pytest.fixture
def mixed():
    """q, k and v of a Q4_K_M file: neighbours of one format are joined, and a part may be in floating point."""
    kinds = [("Q4_K", 32), ("Q4_K", 16), ("Q6_K", 16), ("fp8", 24)]
    parts = [random_weight(name, outputs, 512, seed) for seed, (name, outputs) in enumerate(kinds)]
    plain, bias = draw(16, 512, dtype=torch.bfloat16), draw(104, seed=5).bfloat16()
    linear = QuantizedLinear([*(weight for weight, _ in parts), plain], bias)
    return linear, torch.cat([*(values for _, values in parts), plain.float()]).double(), bias.double()


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_a_linear_is_that_of_the_dequantised_weights(mixed, rows, monkeypatch):
    monkeypatch.setattr(quantized_linear, "DEQUANTIZED_BYTES", 512 * 24 * 16)  # tiles of 16 outputs
    linear, values, bias = mixed
    x, onto = draw(rows, 512, dtype=torch.bfloat16, seed=6), draw(rows, 104, dtype=torch.bfloat16, seed=7)
    expected = x.double() @ values.T + bias
    assert distance(linear.wide(x), expected) < 2**-8  # a part in bf16, or all of them
    assert distance(linear.wide(x)[:, :88], expected[:, :88]) < (1e-6 if rows <= 64 else 2**-8)
    assert distance(linear(x), expected) < 2**-7
    assert distance(linear(x, onto.clone()), expected + onto) < 2**-7


def test_a_linear_over_other_memory_is_the_same(mixed):
    linear, _, _ = mixed
    x = draw(5, 512, dtype=torch.bfloat16)
    moved = linear.over([tensor.clone() for tensor in linear.tensors()])
    for tensor in linear.tensors():
        tensor.zero_()
    assert moved(x).count_nonzero() and not linear(x).count_nonzero()


def test_rows_are_those_of_the_table():
    weight, values = random_weight("Q8_0", 50, 64)
    ids = torch.tensor([49, 3, 3])
    assert torch.equal(QuantizedLinear([weight]).rows(ids), values[ids].bfloat16())
