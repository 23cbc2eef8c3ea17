"""Calls that the kernel could not run within its tensors are refused."""

import pytest
import torch

from offload.architecture.dims import Dimensions
from offload.kernels.native.calls import BlockCalls, merge_call
from offload.kernels.native.checks import InvalidCall, check
from offload.kernels.native.ops import NativeOperations
from tests.support.offloading import native_kernel

ZEROS = torch.zeros
CALLS = BlockCalls(Dimensions(1, 64, 2, 1, 16, 64, 64, True), 2)
KV, Q, K, X = ZEROS(1, 2, 512), ZEROS(3, 2, 16), ZEROS(3, 1, 16), ZEROS(4, 32)
WRONG = {
    "a key beyond the last block": lambda kernel: CALLS.attention(KV, Q, 31),
    "no key": lambda kernel: CALLS.attention(KV, Q, 0),
    "queries in fp64": lambda kernel: CALLS.attention(KV, Q.double(), 9),
    "a table in int64": lambda kernel: CALLS.attention(KV, Q, 9, table=ZEROS(1, 9, dtype=torch.int64)),
    "a short output": lambda kernel: CALLS.attention(KV, Q, 9, out=ZEROS(2, 2, 16)),
    "too few blocks": lambda kernel: CALLS.attention(KV[:, :1], Q, 9),
    "tokens beyond the last block": lambda kernel: CALLS.append(KV, 30, Q, K, K, (K, K), Q),
    "too few keys": lambda kernel: CALLS.append(KV, 0, Q, K[:2], K[:2], (K, K), Q),
    "too few sums": lambda kernel: CALLS.observation(KV, Q, 9, ZEROS(3, 2), ZEROS(1, 10)),
    "more scores than keys": lambda kernel: kernel.score_keys(ZEROS(1, 16), ZEROS(1, 1, 256), ZEROS(1, 17)),
    "partial results of other heads": lambda kernel: merge_call(ZEROS(3, 2, 18), ZEROS(1, 3, 2, 34)),
    "more outputs": lambda kernel: NativeOperations(kernel).linear(ZEROS(32, 32)).into(X, ZEROS(4, 33)),
    "fewer inputs": lambda kernel: NativeOperations(kernel).linear(ZEROS(32, 32))(X[:, :30].contiguous()),
    "half a block": lambda kernel: kernel.gate(X, ZEROS(4, 24)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused(case):
    if (kernel := native_kernel()) is None:
        pytest.skip("there is no native kernel here")
    with pytest.raises(InvalidCall):
        WRONG[case](kernel)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 4), torch.zeros(3, 4).double(), torch.zeros(4, 3).T, torch.zeros(3, 4, device="meta")],
    ids=["size", "dtype", "strides", "device"],
)
def test_the_message_says_what_is_wrong(x):
    with pytest.raises(InvalidCall, match=r"rows must be \[3, 4\] of torch.float32, contiguous, in host memory; it is"):
        check("rows", x, (3, 4), torch.float32)
