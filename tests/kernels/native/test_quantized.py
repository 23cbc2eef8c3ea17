"""The native kernel's products with quantised weights at every level, against fp64."""

import pytest
import torch

from offload.architecture.weight_formats import FORMATS, QuantizedFormat
from offload.kernels.native.kernel import find_kernel
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.panels import format_struct, pack_quantized, unpack_quantized
from offload.kernels.native.structs import BLOCK
from offload.kernels.quantized import QuantizedTensor
from tests.support.native_kernel import NAN, distance, draw, linear
from tests.support.quantized import WIDE_FORMATS, random_weight

pytestmark = pytest.mark.xdist_group("native")
NAMES = [*FORMATS, *WIDE_FORMATS]
ROUNDED = 1e-5  # relative error of sums over activations of which a few are rounded
IDENTITY = QuantizedFormat("int8", 8, 32, False, False, tuple(range(-128, 128)), wide=True)


def product(kernel, weight, x):
    """Return the products of rows with a quantised weight, in fp32."""
    packed, format = pack_quantized(kernel, [weight]), format_struct(weight.format)
    return linear(kernel, x, packed, None, None, torch.full((len(x), weight.shape[0]), NAN), format)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (33, 1280)])
def test_a_packed_weight_has_the_same_values(kernel, name, outputs, inputs):
    weight, values = random_weight(name, outputs, inputs)
    packed, ids = pack_quantized(kernel, [weight]), torch.tensor([outputs - 1, 0, outputs // 2])
    assert 8 * packed.nbytes == weight.format.bits_per_weight * -(-outputs // BLOCK) * BLOCK * inputs
    for dtype in (torch.float32, torch.bfloat16):
        rows = kernel.unpack(packed, format_struct(weight.format), ids, torch.full((3, inputs), NAN, dtype=dtype))
        assert torch.equal(rows, values[ids].to(dtype))
    assert torch.equal(unpack_quantized(packed, weight.format, outputs).dequantized(), values)
    assert torch.equal(pack_quantized(kernel, [weight.split()]), packed)  # the blocks of a file, and codes apart


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (40, 1280)])
def test_a_product_is_that_of_the_dequantised_weights_and_a_row_is_the_same_in_any_company(
    kernel, set_threads, name, outputs, inputs
):
    """Inputs to both sides of the 1,024 that are multiplied at a time; rows of one group of 96 and of two."""
    weight, values = random_weight(name, outputs, inputs)
    x = draw(110, inputs, dtype=torch.bfloat16, seed=3)
    whole = product(kernel, weight, x)
    assert distance(whole, x.double() @ values.double().T) < ROUNDED
    for count in (*range(1, 18), 25, 33, 97):
        set_threads(1 + count % 3)
        first = 7 * count % (111 - count)
        assert torch.equal(product(kernel, weight, x[first : first + count]), whole[first : first + count]), count


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp8"])
def test_levels_have_the_same_bits(kernel, name):
    weight, _ = random_weight(name, 40, 512)
    x = draw(9, 512, dtype=torch.bfloat16)
    assert torch.equal(product(kernel, weight, x), product(find_kernel("portable"), weight, x))


def test_an_activation_is_exact_unless_it_is_small_among_its_group(kernel):
    """Of each group of 32: above 1/128 of the largest exactly, others to 1/32,000 of it."""
    x = draw(6, 64, seed=5)
    x[1, ::7] *= 1e4
    x[2] = torch.linspace(-1, 1, 64) ** 9
    x[3] = 0
    x[4] *= 1e-30
    x[5, 3], x[5, 40] = 3e38, 1.9921875  # a mantissa of 255 too
    x = x.bfloat16()
    codes = torch.eye(64, dtype=torch.int8).view(64, 2, 32)
    found = product(kernel, QuantizedTensor(IDENTITY, codes, torch.ones(64, 2)), x).double().view(6, 2, 32)
    groups = x.double().view(6, 2, 32)
    most, error = groups.abs().amax(-1, keepdim=True), (found - groups).abs()
    assert (error <= most / 32000).all()
    assert not error[groups.abs() > most / 128].any()


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0", "fp8"])
@pytest.mark.parametrize("odd", [NAN, float("inf")])
def test_an_activation_that_is_not_finite_is_seen_in_all_outputs_of_its_row_alone(kernel, name, odd):
    weight, _ = random_weight(name, 16, 256)
    x = draw(3, 256, dtype=torch.bfloat16)
    x[1, 77] = odd
    assert torch.equal(product(kernel, weight, x).isfinite(), torch.tensor([[True], [False], [True]]).expand(3, 16))


def test_parts_in_different_formats_are_one_linear(kernel):
    """As q, k and v of a Q4_K_M file: neighbours of one format are joined, and a part may be in floating point."""
    names = [("Q4_K", 32), ("Q4_K", 16), ("Q6_K", 16), ("Q8_0", 24), ("Q8_0", 8)]
    parts = [random_weight(name, outputs, 512, seed) for seed, (name, outputs) in enumerate(names)]
    plain = draw(16, 512, dtype=torch.bfloat16)
    operations = NativeOperations(kernel)
    linear = operations.quantized_linear([*(weight for weight, _ in parts), plain], bias := draw(112, seed=5))
    assert len(linear.tensors()) == 6  # Q4_K joined; 24 rows do not fill panels; and the bias
    x, onto = draw(5, 512, dtype=torch.bfloat16, seed=6), draw(5, 112, dtype=torch.bfloat16, seed=7)
    expected = x.double() @ torch.cat([*(values.double() for _, values in parts), plain.double()]).T + bias
    assert distance(linear.wide(x), expected) < ROUNDED
    assert distance(linear(x), expected) < 2**-8
    moved = linear.over([tensor.clone() for tensor in linear.tensors()])
    assert torch.equal(moved(x, onto.clone()), linear(x, onto.clone()))
    assert distance(moved(x, onto.clone()), expected + onto) < 2**-8


def test_every_float8_is_itself_and_subnormal_numbers_are_not_flushed(kernel):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].repeat(3)[:384].view(1, 12, 32).repeat(16, 1, 1)
    weight = QuantizedTensor(WIDE_FORMATS["fp8"], codes, torch.ones(16, 3))
    found = product(kernel, weight, torch.eye(384, dtype=torch.bfloat16))
    assert torch.equal(found, codes[0].float().view(384, 1).expand(384, 16))


@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_columns_of_a_weight_are_cut_between_the_groups_of_32(name):
    weight, _ = random_weight(name, 16, 256)
    for start, end in ((0, 128), (0, 96), (64, 256), (32, 160)):
        part = weight.columns(slice(start, end))
        assert part.shape == (16, end - start)
        assert torch.equal(part.dequantized(), weight.split().dequantized()[:, start:end])
    assert weight.columns(slice(16, 256)) is None
