"""The native kernel's products with quantised weights at every level, against fp64."""

import pytest
import torch

from offload.architecture.weight_formats import FORMATS
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.panels import format_struct, pack_quantized, unpack_quantized
from offload.kernels.native.structs import BLOCK
from offload.kernels.quantized import QuantizedTensor
from tests.support.native_kernel import NAN, distance, draw, linear
from tests.support.quantized import WIDE_FORMATS, random_weight

ALL = [*FORMATS, *WIDE_FORMATS]


def packed_of(kernel, weight):
    """Return a function that multiplies rows with a weight, which it packs once: `(x, bias, onto, y)`."""
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    return lambda x, y, bias=None, onto=None: linear(kernel, x, packed, bias, onto, y, format)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (33, 1280)])
def test_a_packed_weight_has_the_same_values(kernel, name, outputs, inputs):
    weight, values = random_weight(name, outputs, inputs)
    packed, ids = pack_quantized(kernel, [weight]), torch.tensor([outputs - 1, 0, outputs // 2])
    assert 8 * packed.nbytes == weight.format.bits_per_weight * -(-outputs // BLOCK) * BLOCK * inputs
    for dtype in (torch.float32, torch.bfloat16):
        rows = kernel.unpack(packed, format_struct(weight.format), ids, torch.full((3, inputs), NAN, dtype=dtype))
        assert torch.equal(rows, values[ids].to(dtype))
    assert torch.equal(unpack_quantized(packed, weight.format, outputs).dequantized(), weight.dequantized())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (33, 1280), (100, 512)])
def test_a_product_is_that_of_the_dequantised_weights(kernel, set_threads, name, outputs, inputs):
    """Up to rounding in fp32; inputs to both sides of the 1,024 that are multiplied at a time. A row has the same bits
    whatever other rows there are."""
    weight, values = random_weight(name, outputs, inputs)
    multiply, bias = packed_of(kernel, weight), draw(outputs, seed=2)
    x, onto = draw(270, inputs, dtype=torch.bfloat16), draw(270, outputs, dtype=torch.bfloat16, seed=3)
    expected = x.double() @ values.double().T
    whole = multiply(x, torch.full((270, outputs), NAN))
    assert distance(whole, expected) < 1e-6
    rounded = multiply(x, torch.full_like(onto, NAN), bias, onto)
    assert distance(rounded, expected + bias + onto) < 2**-8
    for count in (*range(1, 26), 95, 96, 97, 257) if outputs == 33 else (1, 3):
        set_threads(1 + count % 3)
        some = slice(7 * count % (271 - count), 7 * count % (271 - count) + count)
        assert torch.equal(multiply(x[some], torch.full((count, outputs), NAN)), whole[some]), count


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_a_single_row_has_the_same_bits_with_unusual_activations(kernel, name):
    """Where activations or products are subnormal, or not finite: instructions that take them for zero would differ."""
    multiply = packed_of(kernel, random_weight(name, 40, 512)[0])
    usual = draw(5, 512, dtype=torch.bfloat16, seed=3)
    cases = [(draw(5, 512, seed=3) * 2.0**-scale).bfloat16() for scale in (128, 120, 100)]
    for odd in (1e-39, 1e-30, 2.0**-90, float("inf"), NAN, 3e38):
        cases.append(usual.clone())
        cases[-1][:, ::7] = odd
    for x in cases:
        alone = torch.cat([multiply(row[None], torch.empty(1, 40)) for row in x])
        assert torch.equal(alone.view(torch.int32), multiply(x, torch.empty(5, 40)).view(torch.int32))


def test_parts_in_different_formats_are_one_linear(kernel):
    """As q, k and v of a Q4_K_M file: neighbours of one format are joined, and a part may be in floating point."""
    kinds = [("Q4_K", 32), ("Q4_K", 16), ("Q6_K", 16), ("Q8_0", 24), ("Q8_0", 8)]
    parts = [random_weight(name, outputs, 512, seed) for seed, (name, outputs) in enumerate(kinds)]
    plain, operations = draw(16, 512, dtype=torch.bfloat16), NativeOperations(kernel)
    joint = operations.quantized_linear([*(weight for weight, _ in parts), plain], bias := draw(112, seed=5))
    assert len(joint.tensors()) == 6  # Q4_K joined; 24 rows do not fill panels; and the bias
    x, onto = draw(5, 512, dtype=torch.bfloat16, seed=6), draw(5, 112, dtype=torch.bfloat16, seed=7)
    expected = x.double() @ torch.cat([*(values for _, values in parts), plain]).double().T + bias
    assert distance(joint.wide(x), expected) < 1e-6
    assert distance(joint(x), expected) < 2**-8
    moved = joint.over([tensor.clone() for tensor in joint.tensors()])
    assert torch.equal(moved(x, onto.clone()), joint(x, onto.clone()))
    assert distance(moved(x, onto.clone()), expected + onto) < 2**-8


def test_every_float8_is_itself_and_subnormal_numbers_are_not_flushed(kernel):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].repeat(3)[:384].view(1, 12, 32).repeat(16, 1, 1)
    multiply = packed_of(kernel, QuantizedTensor(WIDE_FORMATS["fp8"], codes, torch.ones(16, 3)))
    found = multiply(torch.eye(384, dtype=torch.bfloat16), torch.full((384, 16), NAN))
    assert torch.equal(found, codes[0].float().view(384, 1).expand(384, 16))


@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_columns_of_a_weight_are_cut_between_the_groups_of_32(name):
    weight, _ = random_weight(name, 16, 256)
    for start, end in ((0, 128), (0, 96), (64, 256), (32, 160)):
        part = weight.columns(slice(start, end))
        assert part.shape == (16, end - start)
        assert torch.equal(part.dequantized(), weight.dequantized()[:, start:end])
    assert weight.columns(slice(16, 256)) is None
