"""Calls that the kernel could not run within its tensors are refused, also where assertions are off."""

import subprocess
import sys

import pytest
import torch

from offload.kernels.native.checks import InvalidCall, check
from tests.support.paths import ROOT

WITHOUT_ASSERTIONS = """
import torch
from offload.architecture.dims import Dimensions
from offload.kernels.native.calls import BlockCalls, merge_call
from offload.kernels.native.checks import InvalidCall
from offload.kernels.native import find_kernel
from offload.kernels.native.ops import NativeOperations

assert False, "assertions are off"
calls, kv, q = BlockCalls(Dimensions(1, 64, 2, 1, 16, 64, 64, True), 2), torch.zeros(1, 2, 512), torch.zeros(3, 2, 16)
k, rows, table = torch.zeros(3, 1, 16), (torch.zeros(3, 1, 16),) * 2, torch.zeros(1, 9, dtype=torch.int64)
x, kernel = torch.zeros(4, 32), find_kernel()
linear = NativeOperations(kernel).linear(torch.zeros(32, 32))
for number, attempt in enumerate((
    lambda: calls.attention(kv, q, 31),
    lambda: calls.attention(kv, q, 0),
    lambda: calls.attention(kv, q.double(), 9),
    lambda: calls.attention(kv, q, 9, table=table),
    lambda: calls.attention(kv, q, 9, out=torch.zeros(2, 2, 16)),
    lambda: calls.attention(kv[:, :1], q, 9),
    lambda: calls.append(kv, 30, q, k, k, rows, q),
    lambda: calls.append(kv, 0, q, k[:2], k[:2], rows, q),
    lambda: calls.observation(kv, q, 9, torch.zeros(3, 2), torch.zeros(1, 10)),
    lambda: kernel.score_keys(torch.zeros(1, 16), torch.zeros(1, 1, 256), torch.zeros(1, 17)),
    lambda: merge_call(torch.zeros(3, 2, 18), torch.zeros(1, 3, 2, 34)),
    lambda: linear.into(x, torch.zeros(4, 33)),
    lambda: linear(x[:, :30].contiguous()),
    lambda: kernel.gate(x, torch.zeros(4, 24)),
)):
    try:
        attempt()
    except InvalidCall:
        continue
    raise SystemExit(f"attempt {number} was not refused")
print("all refused")
"""


@pytest.mark.long
def test_wrong_tensors_are_refused_without_assertions():
    run = subprocess.run(
        [sys.executable, "-O", "-c", WITHOUT_ASSERTIONS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (run.stdout, run.returncode) == ("all refused\n", 0), run.stdout + run.stderr


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 4), torch.zeros(3, 4).double(), torch.zeros(4, 3).T, torch.zeros(3, 4, device="meta")],
    ids=["size", "dtype", "strides", "device"],
)
def test_the_message_says_what_is_wrong(x):
    with pytest.raises(InvalidCall, match=r"rows must be \[3, 4\] of torch.float32, contiguous, in host memory; it is"):
        check("rows", x, (3, 4), torch.float32)
