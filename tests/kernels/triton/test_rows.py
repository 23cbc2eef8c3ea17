"""Triton's kernels of norms, RoPE and gates: torch's operations, in the interpreter."""

import sys

import pytest
import torch
import torch.nn.functional as F

from offload.architecture.rope import rotate
from offload.kernels.triton import row_ops
from tests.support.triton_compiler import compile_all

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}  # the interpreter truncates


def drawn(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(found, wanted, dtype):
    assert found.is_contiguous() and found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_norm_is_that_of_rows_and_of_heads(dtype):
    x, weight = drawn(3, 7, 48, dtype=dtype), drawn(48, dtype=dtype, seed=1)
    for some in (x[:, 2], x[:, 2:5], x[..., :48].flatten(0, 1)):
        assert_close(row_ops.rms_norm(some, weight, 1e-5), F.rms_norm(some, (48,), weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gate_is_silu_times_up(dtype):
    x = 3 * drawn(2, 2600, dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    assert_close(row_ops.gated(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("dim", [32, 96])
def test_appended_tokens_are_rotated_and_stored(dtype, is_recorded, dim):
    """Parts of fused rows; what is stored already stays, and all else around it."""
    tokens, heads, kv_heads, start = 5, 3, 2, 4
    stored = 0 if is_recorded else 2
    q, k, v = drawn(tokens, heads + 2 * kv_heads, dim, dtype=dtype).split((heads, kv_heads, kv_heads), dim=1)
    angles = drawn(tokens, dim // 2, seed=1).repeat(1, 2).unsqueeze(1)
    cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
    memory = drawn(2, kv_heads, 12, dim, dtype=dtype, seed=2)
    wanted = memory.clone()
    at = slice(start + stored, start + tokens)
    wanted[0, :, at] = rotate(k, cos_sin)[stored:].transpose(0, 1)
    wanted[1, :, at] = v[stored:].transpose(0, 1)
    position = torch.arange(start, start + tokens, device=DEVICE) if is_recorded else start
    out = row_ops.append(q, k, v, cos_sin, *memory, position, stored)
    assert_close(out, rotate(q, cos_sin), dtype)
    assert_close(memory, wanted, dtype)
    assert torch.equal(memory[1], wanted[1])


linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels")
NAMES = ("q_ptr", "k_ptr", "v_ptr", "x_ptr", "y_ptr", "weight_ptr", "cos_ptr", "sin_ptr", "out_ptr", "keys_ptr")
TYPES = dict.fromkeys((*NAMES, "values_ptr"), "*bf16") | {"positions_ptr": "*i64", "epsilon": "fp32"}


@linux
def test_types_agree_in_every_branch_of_the_kernels():
    """The interpreter does not check types."""
    sizes = {"HEADS": 3, "HEAD_DIM": 96, "BLOCK": 64}
    jobs = [("append_kernel", TYPES, sizes | {"HAS_POSITIONS": own}) for own in (False, True)]
    jobs += [("norm_kernel", TYPES, {"WIDTH": 96, "BLOCK": 128}), ("gate_kernel", TYPES, {"BLOCK": 1024})]
    compile_all("rows", jobs)
