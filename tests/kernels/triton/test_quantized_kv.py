"""Triton's attention to quantised keys and values: that to the dequantised ones, which are the native kernel's."""

import sys

import pytest
import torch

from offload.architecture.kv_formats import GROUP
from offload.kernels.kv_groups import dequantize_groups, quantize_groups
from offload.kernels.native.kv_groups import Groups, dequantize_call, kv_format, quantize_call
from offload.kernels.native.layout import write_blocks
from offload.kernels.triton import ops
from offload.kernels.triton.ops import attend_groups
from offload.settings.kv_formats import KV_FORMATS
from tests.support.offloading import native_kernel
from tests.support.triton_compiler import compile_all

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def keys_and_values(heads, groups, dim):
    """Keys whose channels have an offset of their own, and values, `[heads, groups, 32, dim]`."""
    keys, values = (draw(heads, groups, GROUP, dim, seed=seed) for seed in (1, 2))
    return keys + 3 * draw(heads, 1, 1, dim, seed=3), values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 80])
def test_groups_have_the_bytes_of_the_native_kernels(dtype, dim):
    """Also of numbers that are equal, tiny, or not finite."""
    if (kernel := native_kernel()) is None:
        pytest.skip("there is no native kernel here")
    keys, values = (x.cpu().to(dtype) for x in keys_and_values(2, 3, dim))
    keys[0, 0, :, :5] = torch.tensor([0, 1, -2.5, 1e-30, 448.0], dtype=dtype)
    values[0, 0, :3] = torch.tensor([[0.0], [7.0], [-1e-36]], dtype=dtype)
    keys[1, 1, 4, 3], values[1, 1, 7, 2] = float("inf"), float("nan")
    blocks = torch.zeros((2, 6, GROUP * dim), dtype=dtype)
    write_blocks(blocks, dim, torch.arange(96), keys.flatten(1, 2), values.flatten(1, 2))
    groups = Groups(torch.zeros((2, 3, KV_FORMATS["q8"].run_bytes(dim)), dtype=torch.uint8), kv_format("q8"))
    items = torch.tensor([(head, 2 * group, group) for head in range(2) for group in range(3)], dtype=torch.int32)
    kernel.quantize(quantize_call(blocks, groups, items, dim))
    found = quantize_groups(keys, values)
    header = 4 * dim + 4 * GROUP
    assert torch.equal(found[..., header:], groups.memory[..., header:])
    scales = [x[..., :header].view(torch.bfloat16) for x in (found, groups.memory)]
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    wanted = [torch.empty((6, GROUP, dim)) for _ in range(2)]
    kernel.quantize(dequantize_call(groups, items, *wanted))
    for own, other in zip(dequantize_groups(found, dim, torch.float32), wanted, strict=True):
        torch.testing.assert_close(own.flatten(0, 1), other, rtol=1e-6, atol=1e-6, equal_nan=True)


ONE, SOME = (1, 3, 1, 64, 6), (9, 4, 2, 80, 2)  # tokens, heads, kv_heads, head_dim, groups


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, SOME), (torch.float32, ONE), (torch.bfloat16, ONE)], ids=str
)
def test_it_is_attention_to_the_dequantised(dtype, shape):
    tokens, heads, kv_heads, dim, stop = shape
    groups = quantize_groups(*keys_and_values(kv_heads, stop + 1, dim))
    groups[:, stop:] = 255  # NaN, to be left alone
    q = draw(tokens, heads, dim).to(dtype)
    state, lse = ops.new_state(q, 3), torch.empty((tokens, heads), device=DEVICE)
    attend_groups(q, groups, state, stop - 1, True)
    attend_groups(q, groups[:, stop - 1 :], state, 1, False)  # as a page of its own
    found = ops.finished(state, q.float(), lse)
    keys, values = (
        x[:, :stop].flatten(1, 2).repeat_interleave(heads // kv_heads, 0)
        for x in dequantize_groups(groups, dim, torch.float64)
    )
    logits = torch.einsum("thd,hkd->htk", q.double(), keys) * dim**-0.5
    expected = torch.einsum("htk,hkd->thd", logits.softmax(-1), values)
    assert (found - expected).norm() / expected.norm() < (
        1e-5 if dtype == torch.float32 else 6e-3
    )  # the interpreter truncates
    torch.testing.assert_close(
        lse.double(), logits.logsumexp(-1).T, rtol=0, atol=1e-4 if dtype == torch.float32 else 5e-2
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels")
def test_types_agree_in_every_branch_of_the_kernel():
    """The interpreter does not check types."""
    sizes = {"GROUP": 4, "HEAD_DIM": 96, "FRESH": False, "WIDEN": False, "BLOCK_M": 32, "BLOCK_D": 128}
    types = {"q_ptr": "*bf16", "groups_ptr": "*u8", "state_ptr": "*fp32", "scale": "fp32"}
    compile_all("quantized_kv", [("attend_groups_kernel", types, sizes)])
