"""The native kernel's linears, norm and gate at every level, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from offload.kernels.native.layout import pack_weight, weight_rows
from tests.support.native_kernel import DTYPES, NAN, distance, draw, linear

ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-20}  # of a result, with its last digit to spare
# Outputs that fill panels, pairs of panels and neither; inputs to both sides of the 1024 that are multiplied at a time.
SIZES = [(16, 16), (1, 2), (33, 64), (40, 1022), (100, 1024), (24, 1026), (48, 1040), (17, 2600)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_linear_is_the_product(kernel, dtype, outputs, inputs):
    weight, bias = draw(outputs, inputs, dtype=dtype, seed=1), draw(outputs, seed=2)
    packed = pack_weight(weight)
    for rows in (1, 5, 13, 97):
        x, onto = draw(rows, inputs, dtype=dtype, seed=4), draw(rows, outputs, dtype=dtype, seed=3)
        expected, given = x.double() @ weight.double().T, onto.double()
        wide = linear(kernel, x, packed, bias, None, torch.full((rows, outputs), NAN))
        assert distance(wide, expected + bias) < 1e-5
        assert linear(kernel, x, packed, None, onto, onto) is onto
        assert torch.allclose(onto.double(), expected + given, rtol=ROUNDING[dtype], atol=1e-3)
    ids = torch.randint(0, outputs, (30,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight_rows(packed, ids), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [96, 1040, 1056])
def test_a_row_of_a_linear_is_the_same_in_any_company(kernel, set_threads, dtype, inputs):
    """1 to 130 rows and 257, of 300, by one, two and three threads: bit for bit."""
    weight, bias = pack_weight(draw(40, inputs, dtype=dtype, seed=1)), draw(40, seed=2)
    x, onto = draw(300, inputs, dtype=dtype, seed=3), draw(300, 40, dtype=dtype, seed=4)

    def some(first, last, y_dtype=dtype):
        y = torch.full((last - first, 40), NAN, dtype=y_dtype)
        return linear(kernel, x[first:last], weight, bias, onto[first:last] if y_dtype == dtype else None, y)

    whole, wide = some(0, 300), some(0, 300, torch.float32)
    for count in (*range(1, 131), 257):
        set_threads(1 + count % 3)
        first = 7 * count % (301 - count)
        assert torch.equal(some(first, first + count), whole[first : first + count]), count
    assert torch.equal(some(77, 78, torch.float32), wide[77:78])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 48, 576])
def test_norm_is_rmsnorm_and_gate_is_silu_times_up(kernel, set_threads, dtype, width):
    weight = 1 + draw(width, dtype=dtype, seed=1) / 4
    for rows, scale in ((1, 1.0), (5, 1e-4), (40, 1e3)):
        x = (draw(rows, width, seed=rows) * scale).to(dtype)
        both = (draw(rows, 2 * width, seed=rows) * scale).to(dtype)
        both[0, :5] = torch.tensor([0.0, 88.0, -88.0, -1e30, 1e30])
        results = []
        for threads in (1, 3):
            set_threads(threads)
            normed = kernel.norm(x, weight, 1e-5, torch.full_like(x, NAN))
            results.append((normed, kernel.gate(both, torch.full_like(x, NAN))))
        (normed, gated), other = results
        assert torch.equal(normed, other[0]) and torch.equal(gated, other[1])
        expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
        assert torch.allclose(normed.double(), expected, rtol=ROUNDING[dtype], atol=1e-30)
        assert torch.equal(kernel.norm(x[:1], weight, 1e-5, torch.full_like(x[:1], NAN)), normed[:1])
        # Far below zero, where nearly nothing is left: e^x has as many digits fewer as x has before the point, and it
        # ends at 2^-126.
        gate, up = both.double().chunk(2, dim=-1)
        expected, tiny = F.silu(gate) * up, (gate * up).abs() * 2**-125
        assert ((gated - expected).abs() <= max(ROUNDING[dtype], 2**-16) * expected.abs() + tiny).all()
        assert torch.allclose(gated[gate > -4].double(), expected[gate > -4], rtol=ROUNDING[dtype])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1, -0x400000], ids=hex)
@pytest.mark.parametrize("outputs", [16, 24])
def test_nan_and_infinity_are_stored_as_such(kernel, bits, outputs):
    """Whole panels and parts of one; rounding to bf16 must not turn a NaN's payload into a number."""
    x, weight = draw(3, 32, dtype=torch.bfloat16), pack_weight(draw(outputs, 32, dtype=torch.bfloat16, seed=1))
    bias = draw(outputs, seed=2)
    bias[::3], bias[1::3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32), float("-inf")
    y = linear(kernel, x, weight, bias, None, torch.zeros(3, outputs, dtype=torch.bfloat16))
    assert y[:, ::3].isnan().all() and y[:, 1::3].isneginf().all() and y[:, 2::3].isfinite().all()
