"""Accumulators: a state handed from one to another is attention over the keys of both."""

import pytest
import torch

from offload.architecture.hf_config import shape_from_config
from offload.kernels.attention import attend_reference
from offload.memory.page import BlockPageFormat, NativePageFormat
from tests.support.models import make_hf_model
from tests.support.offloading import SHAPE, native_kernel

TOKENS = 512

pytestmark = pytest.mark.skipif(native_kernel() is None, reason="the native kernel is not built")


@pytest.fixture(scope="module")
def shape():
    return shape_from_config(make_hf_model("llama", **SHAPE).config.to_dict(), {})


def pages(shape, kernel, dtype, count=2):
    """Return keys, values and, for each of both formats, their pages."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(shape.kv_heads, count * TOKENS, shape.head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    formats = {"native": NativePageFormat(shape, TOKENS, kernel), "torch": BlockPageFormat(shape, TOKENS)}
    found = {}
    for name, format in formats.items():
        found[name] = format, [torch.empty(format.numbers, dtype=dtype) for _ in range(count)]
        for page, k, v in zip(found[name][1], keys.split(TOKENS, 1), values.split(TOKENS, 1), strict=True):
            format.write(page, 0, k, v)
    return keys, values, found


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 3.0), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize(("device", "host"), [("native", "torch"), ("torch", "native"), ("native", "native")])
def test_a_state_of_other_keys_is_added(shape, device, host, scale, dtype):
    keys, values, found = pages(shape, native_kernel(), dtype)
    q = (torch.randn(3, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    results = []
    for name, index in ((device, 0), (host, 1)):
        format, there = found[name]
        results.append(format.accumulator(q))
        results[-1].attend(there[index], slice(0, len(q)), TOKENS)
    results[0].add_state(results[1].state())
    group = shape.heads // shape.kv_heads
    k, v = (x.repeat_interleave(group, 0)[None] for x in (keys, values))
    expected, _ = attend_reference(q.transpose(0, 1)[None], k, v, False)
    error = (results[0].output().float() - expected[0].transpose(0, 1).float()).abs().max()
    assert error < (0.02 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("host", ["native", "torch"])
def test_a_state_is_the_maximum_the_sum_and_the_weighted_values(shape, host):
    keys, _, found = pages(shape, native_kernel(), torch.float32, 1)
    q = torch.randn(2, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(1))
    format, (page,) = found[host]
    result = format.accumulator(q)
    result.attend(page, slice(0, 2), TOKENS)
    state = result.state()
    group = shape.heads // shape.kv_heads
    logits = torch.einsum("thd,hkd->thk", q, keys.repeat_interleave(group, 0)) * shape.head_dim**-0.5
    lse = state[..., 0] + state[..., 1].log()
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
