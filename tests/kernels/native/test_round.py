"""Weights rounded by the kernel at every level, against torch's operations: the same bits."""

import pytest
import torch

from offload.kernels.native.panels import round_weight
from offload.loading.formats.gguf_blocks import FORMATS
from tests.support.native_kernel import draw
from tests.support.rounding import quantize_by_torch

pytestmark = pytest.mark.xdist_group("native")
WEIGHTS = {
    "normal": draw(37, 512),
    "bf16": draw(9, 2304, dtype=torch.bfloat16, seed=1),
    "fp16": draw(5, 768, dtype=torch.float16, seed=2),
    "outliers": draw(3, 256, seed=3) ** 5,
    "ties": draw(40, 256, seed=4).round(),
    "subnormal scales": draw(40, 256, seed=5) * 1e-6,
    "no scales": draw(40, 256, seed=6) * 1e-30,
    "zeros": torch.zeros(5, 256),
    "large": draw(40, 256, seed=7) * 1e4,
    "transposed": draw(256, 33, seed=8).T,
}
TOO_LARGE = {
    "nan": draw(40, 256).index_fill_(0, torch.tensor(7), float("nan")),
    "one infinite": torch.cat((draw(10, 255), torch.tensor([[float("-inf")]]).expand(10, 1)), dim=1),
    "beyond fp16": -draw(40, 256) * 1e8,
}


def bits(x):
    return None if x is None else x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q6_K", "Q8_0"])
def test_the_bits_are_those_of_torch(kernel, set_threads, name):
    for number, (words, weight) in enumerate(WEIGHTS.items()):
        set_threads(1 + number % 3)
        found = round_weight(kernel, weight, FORMATS[name])
        expected = quantize_by_torch(weight, FORMATS[name])
        for part in ("codes", "scales", "minima", "factors"):
            ours, theirs = bits(getattr(found, part)), bits(getattr(expected, part))
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), (words, part)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("weight", TOO_LARGE.values(), ids=TOO_LARGE)
def test_weights_that_do_not_fit_are_refused(kernel, name, weight):
    assert round_weight(kernel, weight, FORMATS[name]) is None
    assert quantize_by_torch(weight, FORMATS[name]) is None
