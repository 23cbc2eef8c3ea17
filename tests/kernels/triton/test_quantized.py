"""Triton's products with quantised weights, in its interpreter on a CPU, compiled on a GPU; against fp64."""

import sys

import pytest
import torch

from offload.architecture.weight_formats import FORMATS
from offload.kernels.device_weight import pack_for_device
from offload.kernels.triton import row_ops as ops
from tests.support.native_kernel import NAN, distance
from tests.support.quantized import WIDE_FORMATS, random_weight
from tests.support.triton_compiler import compile_all

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
OUTPUTS, INPUTS = 20, 256
ALL = [*FORMATS, *WIDE_FORMATS]


def weight_of(name, outputs=OUTPUTS, inputs=INPUTS, seed=0):
    """A packed weight, and its values in fp64."""
    weight, values = random_weight(name, outputs, inputs, seed)
    return pack_for_device([weight.to(DEVICE)]), values.double().to(DEVICE)


def draw(*size, dtype=torch.bfloat16, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("name", ALL)
def test_a_product_is_that_of_the_dequantised_weights(name):
    """Up to rounding in fp32, between numbers that are left alone."""
    weight, values = weight_of(name)
    x = draw(3, INPUTS)
    y = torch.full((3, OUTPUTS + 2), NAN, device=DEVICE)
    ops.product(x, weight, None, y[:, 1:-1], False)
    assert distance(y[:, 1:-1], x.double() @ values.T) < 1e-6
    assert y[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("name", ALL)
def test_dequantised_rows_have_the_values_of_the_file(name):
    weight, values = weight_of(name)
    ids = torch.tensor([OUTPUTS - 1, 0, 13], device=DEVICE)
    found = ops.dequantize(weight, ids, torch.full((3, INPUTS), NAN, device=DEVICE))
    assert torch.equal(found, values[ids].float())
    found = ops.dequantize(weight, 5, torch.full((12, INPUTS), NAN, device=DEVICE))
    assert torch.equal(found, values[5:17].float())


@pytest.mark.parametrize(("inputs", "rows"), [(32, 1), (96, 40)])  # one group; two splits, of which one is shorter
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])  # it cuts bits off
def test_bias_and_residual_are_added(inputs, rows, dtype, error):
    weight, values = weight_of("Q4_1", 70, inputs)
    x, bias, y = draw(rows, inputs), draw(70, seed=1), draw(rows, 70, seed=2).to(dtype)
    expected = x.double() @ values.T + bias.double() + y.double()
    ops.product(x, weight, bias, y, True)
    assert distance(y, expected) < error


@pytest.mark.cuda
@pytest.mark.skipif(not ON_GPU, reason="the interpreter multiplies by numpy, whose rounding depends on the rows")
@pytest.mark.parametrize("name", ALL)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(name):
    weight, _ = weight_of(name, 200, 1024)
    x, whole = draw(64, 1024), torch.zeros(64, 200, device=DEVICE)
    ops.product(x, weight, None, whole, False)
    for rows in (1, 2, 5, 17, 33):
        some = torch.zeros(rows, 200, device=DEVICE)
        ops.product(x[:rows], weight, None, some, False)
        assert torch.equal(some, whole[:rows]), rows


MODULE = "quantized"
COMPILED = ("Q5_1", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "fp8", "int4 with minima")
FLAGS = {"HAS_BIAS": True, "ADD": True, "WIDEN": False, "BLOCK_N": 64, "BLOCK_M": 16}


def compilation(name):
    """What a GPU's compiler gets for a format: kernel, types of pointers, constants."""
    weight, _ = weight_of(name, 16, 256)
    kinds = {torch.uint8: "*u8", torch.int8: "*i8", torch.float16: "*fp16", torch.float32: "*fp32"}
    numbers = dict.fromkeys(("scales_ptr", "minima_ptr"), kinds[weight.scales.dtype])
    pointers = {"codes_ptr": kinds[weight.codes.dtype], "high_ptr": "*i32", "levels_ptr": "*fp32", **numbers}
    pointers |= dict.fromkeys(("factors_ptr", "minimum_factors_ptr"), "*fp16")
    pointers |= dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16") | {"ids_ptr": "*i64"}
    shared = ops.constants(*ops.operands(weight))
    yield "product_kernel", pointers, shared | FLAGS
    yield "dequantize_kernel", pointers, shared | {"HAS_IDS": True, "BLOCK_N": 64}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels")
def test_types_agree_in_every_branch_of_the_kernels():
    """The compiler's first pass needs no GPU; the interpreter does not check types."""
    compile_all(MODULE, [job for name in COMPILED for job in compilation(name)])
