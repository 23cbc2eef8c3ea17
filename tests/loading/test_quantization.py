"""Rounding weights to 4 to 8 bits: its error, its exactness on a grid, and which tensors it is for."""

import pytest
import torch

from offload.architecture.weight_formats import format_of
from offload.loading.formats.checkpoint import quantize

SIZE = (48, 512)
NAME = "model.layers.0.mlp.down_proj.weight"


def draw(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def error(weight, level):
    """Return the root mean square error relative to the weights."""
    found = quantize(weight, format_of(level, NAME, weight.shape)).dequantized()
    return ((found - weight).square().mean() / weight.square().mean()).sqrt().item()


# Normal weights in groups of 32 span 4.1 standard deviations, and reach 2.34 from zero, in groups of 16 2.07: a step
# is that over the number of steps, and the error of a rounded number a step over the root of 12.
RANGES = {"q4": 4.1 / 15, "q5": 4.1 / 31, "q6": 2.07 / 32, "q8": 2.34 / 127}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_that_of_rounding_and_less_with_each_bit(dtype):
    weight = draw(*SIZE).to(dtype).float()
    errors = {level: error(weight, level) for level in RANGES}
    assert sorted(errors.values(), reverse=True) == list(errors.values())
    for level, step in RANGES.items():
        assert 0.85 < errors[level] / (step / 12**0.5) < 1.1, level


def test_each_group_is_rounded_by_itself():
    weight = draw(700, 512)
    for kind in {format_of(level, NAME, SIZE) for level in RANGES}:
        whole = quantize(weight, kind).dequantized()
        assert torch.equal(quantize(weight[650:651], kind).dequantized(), whole[650:651])
        assert torch.equal(quantize(weight[:, 256:].contiguous(), kind).dequantized(), whole[:, 256:])


def test_constant_and_tiny_weights_are_finite_and_others_are_refused():
    for kind in {format_of(level, NAME, SIZE) for level in RANGES}:
        for value in (0.0, 0.5, 1e-30):
            found = quantize(torch.full(SIZE, value), kind).dequantized()
            assert (found - value).abs().max() <= 2**-9 * value + 1e-7, (kind.name, value)
        for value in (float("nan"), float("inf"), 1e30):
            assert quantize(draw(*SIZE).index_fill_(0, torch.tensor(7), value), kind) is None


def test_formats_by_tensor():
    names = {level: format_of(level, NAME, SIZE).name for level in RANGES}
    assert names == {"q4": "Q4_1", "q5": "Q5_1", "q6": "Q6_K", "q8": "Q8_0"}
    assert format_of("q6", NAME, (16, 576)).name == "Q8_0"  # no blocks of 256
    assert format_of("q4", NAME, (16, 576)).name == "Q4_1"
    assert format_of("q4", NAME, (16, 48)) is None
    assert format_of("q4", "model.norm.weight", (512,)) is None
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert format_of("q4", name, SIZE).name == "Q8_0"
