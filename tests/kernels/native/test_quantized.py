"""The native kernel's products with quantised weights at every level, against fp64."""

import pytest
import torch

from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.panels import format_struct, pack_quantized, unpack_quantized
from offload.kernels.native.structs import BLOCK
from offload.loading.formats.gguf_blocks import FORMATS, split_blocks
from tests.support.native_kernel import NAN, distance, draw, linear
from tests.support.quantized import random_blocks


def weight_of(name, outputs, inputs, seed=0):
    data, values = random_blocks(name, outputs, inputs, seed)
    return split_blocks(name, torch.from_numpy(data)), torch.from_numpy(values).double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (33, 1280), (100, 512)])
def test_a_packed_weight_has_the_same_values(kernel, name, outputs, inputs):
    weight, values = weight_of(name, outputs, inputs)
    packed, ids = pack_quantized(kernel, [weight]), torch.tensor([outputs - 1, 0, outputs // 2])
    assert 8 * packed.nbytes == weight.format.bits_per_weight * -(-outputs // BLOCK) * BLOCK * inputs
    for dtype in (torch.float32, torch.bfloat16):
        rows = kernel.unpack(packed, format_struct(weight.format), ids, torch.full((3, inputs), NAN, dtype=dtype))
        assert torch.equal(rows, values[ids].to(dtype))
    assert torch.equal(unpack_quantized(packed, weight.format, outputs).dequantized(), weight.dequantized())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (33, 1280), (100, 512)])
def test_a_product_is_that_of_the_dequantised_weights(kernel, name, outputs, inputs):
    """Up to rounding in fp32; inputs to both sides of the 1,024 that are multiplied at a time."""
    weight, values = weight_of(name, outputs, inputs)
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    bias = draw(outputs, seed=2)
    for rows in (1, 7, 13, 97):
        x, onto = draw(rows, inputs, dtype=torch.bfloat16, seed=rows), draw(rows, outputs, dtype=torch.bfloat16, seed=3)
        expected = x.double() @ values.T
        y = torch.full((rows, outputs), NAN)
        assert distance(linear(kernel, x, packed, None, None, y, format), expected) < 1e-6
        rounded = linear(kernel, x, packed, bias, onto, torch.full_like(onto, NAN), format)
        assert distance(rounded, expected + bias + onto) < 2**-8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", [256, 1280])
def test_a_row_is_the_same_whatever_other_rows_there_are(kernel, set_threads, name, inputs):
    weight, _ = weight_of(name, 40, inputs)
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    x = draw(270, inputs, dtype=torch.bfloat16, seed=3)

    def some(first, last):
        return linear(kernel, x[first:last], packed, None, None, torch.full((last - first, 40), NAN), format)

    whole = some(0, 270)
    for count in (*range(1, 26), 95, 96, 97, 257):
        set_threads(1 + count % 3)
        first = 7 * count % (271 - count)
        assert torch.equal(some(first, first + count), whole[first : first + count]), count


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("odd", [1e-39, 1e-30, 2.0**-90, float("inf"), NAN, 3e38])
def test_a_single_row_has_the_same_bits_with_unusual_activations(kernel, name, odd):
    """Matrix instructions take subnormal numbers for zero; a single row may be computed without them."""
    x = draw(5, 512, dtype=torch.bfloat16, seed=3)
    x[:, ::7] = odd
    assert_rows_are_the_same_alone(kernel, name, x)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("scale", [2.0**-128, 2.0**-120, 2.0**-100])
def test_a_single_row_has_the_same_bits_with_tiny_activations(kernel, name, scale):
    """Where all activations are subnormal, or all products, a tile product is zero and a vector product is not."""
    assert_rows_are_the_same_alone(kernel, name, (draw(5, 512, seed=3) * scale).bfloat16())


def assert_rows_are_the_same_alone(kernel, name, x):
    weight, _ = weight_of(name, 40, 512)
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)

    def some(rows):
        return linear(kernel, rows, packed, None, None, torch.empty((len(rows), 40)), format)

    alone = torch.cat([some(row[None]) for row in x])
    assert torch.equal(alone.view(torch.int32), some(x).view(torch.int32))


def test_parts_in_different_formats_are_one_linear(kernel):
    """As q, k and v of a Q4_K_M file: neighbours of one format are joined, and a part may be in floating point."""
    parts = [weight_of(name, outputs, 512, seed) for seed, (name, outputs) in enumerate(
        [("Q4_K", 32), ("Q4_K", 16), ("Q6_K", 16), ("Q8_0", 24), ("Q8_0", 8)]
    )]  # fmt: skip
    plain = draw(16, 512, dtype=torch.bfloat16)
    operations = NativeOperations(kernel)
    linear = operations.quantized_linear([*(weight for weight, _ in parts), plain], bias := draw(112, seed=5))
    assert len(linear.tensors()) == 6  # Q4_K joined; 24 rows do not fill panels; and the bias
    x, onto = draw(5, 512, dtype=torch.bfloat16, seed=6), draw(5, 112, dtype=torch.bfloat16, seed=7)
    expected = x.double() @ torch.cat([*(values for _, values in parts), plain.double()]).T + bias
    assert distance(linear.wide(x), expected) < 1e-6
    assert distance(linear(x), expected) < 2**-8
    moved = linear.over([tensor.clone() for tensor in linear.tensors()])
    assert torch.equal(moved(x, onto.clone()), linear(x, onto.clone()))
    assert distance(moved(x, onto.clone()), expected + onto) < 2**-8


def test_extreme_activations_and_scales_stay_finite_and_nan_is_shown(kernel):
    weight, values = weight_of("Q4_1", 16, 64)
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    x = torch.tensor([[1e30], [1e-30], [NAN]]).expand(3, 64).to(torch.bfloat16).contiguous()
    y = linear(kernel, x, packed, None, None, torch.zeros(3, 16), format)
    assert torch.allclose(y[:2].double(), x[:2].double() @ values.T, rtol=1e-4)
    assert torch.isnan(y[2]).all()
