"""Quantised weights with scales in fp32, as other libraries' checkpoints have, at every level, against fp64."""

import pytest
import torch

from offload.kernels.native.panels import format_struct, pack_quantized, unpack_quantized
from offload.kernels.native.structs import BLOCK
from offload.kernels.quantized import QuantizedFormat, QuantizedTensor
from tests.support.native_kernel import NAN, distance, draw, linear

pytestmark = pytest.mark.xdist_group("native")
FORMATS = {
    "int4": QuantizedFormat("int4", 4, 128, False, False, tuple(range(-8, 8)), wide=True),
    "int4 with minima": QuantizedFormat("int4", 4, 64, False, True, tuple(range(-8, 8)), wide=True),
    "int8": QuantizedFormat("int8", 8, 32, False, False, tuple(range(-128, 128)), wide=True),
    "int8 with minima": QuantizedFormat("int8", 8, 128, False, True, tuple(range(-128, 128)), wide=True),
    "fp8": QuantizedFormat("fp8", 8, 128, False, False, (), wide=True),
}


def weight_of(name, outputs, inputs, seed=0):
    """Return a random weight in which every code occurs, and its values in fp64."""
    kind, random = FORMATS[name], torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**kind.bits, (outputs, inputs // 32, 32), dtype=torch.uint8, generator=random)
    if kind.is_float:
        codes = torch.where(codes & 127 == 127, 3, codes).view(torch.float8_e4m3fn)  # no NaN
        levels = codes.double()
    else:
        codes = codes if kind.bits < 8 else codes.view(torch.int8)
        levels = codes.double() - (8 if kind.bits == 4 else 0)
    scales, minima = draw(2, outputs, inputs // kind.group, seed=seed)
    values = levels.flatten(1).unflatten(1, (-1, kind.group)) * scales.double().unsqueeze(-1)
    values = (values + (minima.double().unsqueeze(-1) if kind.has_minimum else 0)).flatten(1)
    return QuantizedTensor(kind, codes, scales, minima if kind.has_minimum else None), values


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 128), (33, 1280), (100, 256)])
def test_a_packed_weight_has_the_same_values(kernel, name, outputs, inputs):
    weight, values = weight_of(name, outputs, inputs)
    assert torch.allclose(weight.dequantized().double(), values, rtol=1e-6, atol=1e-6)
    packed, ids = pack_quantized(kernel, [weight]), torch.tensor([outputs - 1, 0, outputs // 2])
    assert 8 * packed.nbytes == weight.format.bits_per_weight * -(-outputs // BLOCK) * BLOCK * inputs
    rows = kernel.unpack(packed, format_struct(weight.format), ids, torch.full((3, inputs), NAN))
    assert torch.equal(rows, weight.dequantized()[ids])
    assert torch.equal(unpack_quantized(packed, weight.format, outputs).dequantized(), weight.dequantized())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 1280), (100, 256)])
def test_a_product_is_that_of_the_dequantised_weights(kernel, name, outputs, inputs):
    weight, values = weight_of(name, outputs, inputs)
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    x = draw(97, inputs, dtype=torch.bfloat16, seed=1)
    whole = linear(kernel, x, packed, None, None, torch.full((97, outputs), NAN), format)
    assert distance(whole, x.double() @ values.T) < 1e-6
    for rows in (1, 2, 3, 7, 13):  # the same bits whatever other rows there are
        some = linear(kernel, x[:rows], packed, None, None, torch.full((rows, outputs), NAN), format)
        assert torch.equal(some, whole[:rows])


def test_every_float8_is_itself_and_subnormal_numbers_are_not_flushed(kernel):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].repeat(3)[:384].view(1, 12, 32).repeat(16, 1, 1)
    weight = QuantizedTensor(FORMATS["fp8"], codes, torch.ones(16, 3))
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    found = linear(kernel, torch.eye(384, dtype=torch.bfloat16), packed, None, None, torch.full((384, 16), NAN), format)
    assert torch.equal(found, codes[0].float().view(384, 1).expand(384, 16))


@pytest.mark.parametrize("name", FORMATS)
def test_columns_of_a_weight_are_cut_between_the_groups_of_32(name):
    weight, _ = weight_of(name, 16, 256)
    for start, end in ((0, 128), (0, 96), (64, 256), (32, 160)):
        part = weight.columns(slice(start, end))
        assert part.shape == (16, end - start)
        assert torch.equal(part.dequantized(), weight.dequantized()[:, start:end])
    assert weight.columns(slice(16, 256)) is None
