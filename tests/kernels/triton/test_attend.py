"""Triton's attention against its definition: in Triton's interpreter on a CPU, compiled where there is a GPU."""

import sys

import pytest
import torch

from offload.kernels.attention import attend_causal, attend_reference, received_attention
from offload.kernels.native.layout import write_blocks
from offload.kernels.triton import BLOCKS, ops
from offload.kernels.triton.accumulate import attend_table, attend_table_before
from offload.kernels.triton.ops import observe
from tests.support.triton_compiler import compile_all

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def random(*size, dtype=torch.float32, scale=1.0, seed=0):
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def expected(q, keys, values, seen, causal):
    """The definition, a query at a time."""
    group = q.shape[1] // len(keys)
    outs, sums = [], []
    for index, query in enumerate(q):
        end = seen + index * causal
        k, v = (x[:, :end].repeat_interleave(group, 0)[None] for x in (keys, values))
        out, lse = attend_reference(query[None, :, None], k, v, False)
        outs.append(out[0, :, 0])
        sums.append(lse[0, :, 0])
    return torch.stack(outs).float(), torch.stack(sums)


def attend(q, keys, values, state, seen, causal=False, fresh=False):
    ops.attend(q, keys, values, state, seen, causal, fresh)


def finished(state, q):
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=DEVICE)
    return ops.finished(state, q, lse).float(), lse


SHAPES = [  # tokens, heads, kv_heads, head_dim, seen, causal
    (1, 1, 1, 16, 1, False),
    (1, 8, 2, 64, 200, False),
    (5, 4, 4, 48, 130, True),
    (3, 6, 2, 80, 64, True),
    (17, 8, 1, 128, 300, True),
    (64, 4, 2, 32, 65, True),
    (2, 2, 2, 256, 70, False),
    (8, 4, 1, 96, 1, True),
]


@pytest.mark.daily("(1, 8*", "(1, 1*dtype0", "(5,*dtype1", "(3,*dtype2", "(64,*dtype0", "(2,*dtype1", "(8,*dtype2")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_plain_keys_is_the_definition(shape, dtype):
    tokens, heads, kv_heads, head_dim, seen, causal = shape
    count = seen + tokens
    q, kv = random(tokens, heads, head_dim, dtype=dtype), random(kv_heads, count, 2, head_dim, dtype=dtype, seed=1)
    keys, values = kv.unbind(2)
    state = ops.new_state(q, 3)
    attend(q, keys, values, state, seen, causal, fresh=True)
    out, lse = finished(state, q)
    wanted, sums = expected(q, keys, values, seen, causal)
    assert (out - wanted).abs().max() < TOLERANCE[dtype] * 3
    assert (lse - sums).abs().max() < TOLERANCE[dtype] * 3


@pytest.mark.parametrize("head_dim", [16, 96])
def test_a_state_carried_from_page_to_page_is_attention_over_all_of_them(head_dim):
    q = random(4, 4, head_dim, dtype=torch.bfloat16)
    keys, values = (random(2, 96, head_dim, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    state = ops.new_state(q, 2)
    for start, fresh in ((0, True), (32, False)):
        attend(q, keys[:, start:], values[:, start:], state, 32, fresh=fresh)
    attend(q, keys[:, 64:], values[:, 64:], state, 7, causal=True)
    out, lse = finished(state, q)
    wanted, sums = expected(q, keys, values, 71, True)
    assert (out - wanted).abs().max() < 2e-2
    assert (lse - sums).abs().max() < 2e-2


@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (6, 112)])
def test_attention_over_the_native_kernels_blocks_is_that_over_plain_keys(head_dim, tokens):
    q = random(tokens, 4, head_dim, dtype=torch.bfloat16)
    keys, values = (random(2, 80, head_dim, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    blocks = torch.zeros((2, 5, 32 * head_dim), dtype=torch.bfloat16, device=DEVICE)
    write_blocks(blocks, head_dim, torch.arange(80, device=DEVICE), keys, values)
    ours, plain = ops.new_state(q, 2), ops.new_state(q, 2)
    ops.attend(q, blocks, blocks, ours, 70, layout=BLOCKS)
    attend(q, keys, values, plain, 70, causal=True, fresh=True)
    assert torch.equal(ours, plain)


def chosen(x, table, chunk, tail):
    """The keys or values of each head's chunks, and those at the positions `tail`."""
    at = [[p for c in row for p in range(chunk * c, chunk * (c + 1))] + [*tail] for row in table.tolist()]
    return torch.stack([x[head, own] for head, own in enumerate(at)])


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_table_of_chunks_is_attention_over_those_chunks_and_the_tail(is_causal):
    q, keys, values = random(3, 4, 64), random(2, 120, 64, seed=1), random(2, 120, 64, seed=2)
    table = torch.tensor([[0, 3, 7, 12], [5, 1, 12, 0]], dtype=torch.int32, device=DEVICE)
    seen = 4 * 8 + 13 - 2 * is_causal
    attend_all = attend_table if is_causal else lambda *call: attend_table_before(*call).out
    found = attend_all(q, keys, values, table, 8, (seen, 104))
    wanted, _ = expected(q, *(chosen(x, table, 8, range(104, 117)) for x in (keys, values)), seen, is_causal)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("seen", "slots", "tail"), [(43, 4, 104), (1, 0, 0), (30, 2, 24)])
def test_lengths_of_a_table_in_device_memory_are_those_lengths(seen, slots, tail):
    q, chunk = random(3, 4, 64), 8
    keys, values = random(2, 120, 64, seed=1), random(2, 120, 64, seed=2)
    keys[:, tail + seen - slots * chunk + len(q) :] = float("nan")  # not of the tail yet
    table = torch.tensor([[0, 2, 7, 12], [1, 0, 12, 0]], dtype=torch.int32, device=DEVICE)
    found = attend_table(q, keys, values, table, chunk, torch.tensor([seen, slots, tail], device=DEVICE))
    wanted = attend_table(q, keys, values, table[:, :slots], chunk, (seen, tail))
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1000.0])
def test_extreme_logits_give_no_nan_and_nan_shows_in_every_row_that_sees_it(scale):
    q, keys, values = random(3, 2, 64, scale=scale), random(2, 200, 64, scale=scale, seed=1), random(2, 200, 64, seed=2)
    keys[:, 199] = float("nan")
    state = ops.new_state(q, 3)
    attend(q, keys, values, state, 198, causal=True, fresh=True)
    (out, lse), (wanted, sums) = finished(state, q), expected(q, keys, values, 198, True)
    assert (out - wanted)[:2].abs().max() < 1e-3 and out[2].isnan().all()
    assert ((lse - sums)[:2].abs() / sums[:2].abs().clamp(min=1)).max() < 1e-5


@pytest.mark.cuda
@pytest.mark.skipif(not ON_GPU, reason="the interpreter multiplies by numpy, whose rounding depends on the rows")
@pytest.mark.parametrize("rows", [1, 2, 5, 30])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(rows):
    q, keys, values = (
        random(30, 4, 64, dtype=torch.bfloat16),
        *(random(2, 90, 64, dtype=torch.bfloat16, seed=s) for s in (1, 2)),
    )
    whole, some = ops.new_state(q, 2), ops.new_state(q[:rows], 2)
    attend(q, keys, values, whole, 60, causal=True, fresh=True)
    attend(q[:rows], keys, values, some, 60, causal=True, fresh=True)
    assert torch.equal(whole[:, :rows], some)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8, 2, 64, 200), (9, 6, 2, 48, 130), (70, 3, 1, 32, 80)], ids=str)
def test_the_attention_that_keys_receive_is_that_of_torch(shape, dtype):
    tokens, heads, kv_heads, head_dim, count = shape
    keys, values = (random(kv_heads, count + tokens, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    keys, values = keys[:, : max(count, tokens)], values[:, : max(count, tokens)]
    q = random(tokens, heads, head_dim, dtype=dtype)
    lse = attend_causal(q, keys, values).lse
    found = torch.ones((kv_heads, keys.shape[1] + 2), device=DEVICE)
    observe(q, keys, lse, found)
    assert (found[:, -2:] == 1).all()
    wanted = 1 + received_attention(q, keys, lse)
    torch.testing.assert_close(found[:, :-2], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels")
def test_types_agree_in_the_kernel_of_received_attention():
    """The interpreter does not check types."""
    sizes = {"GROUP": 3, "HEAD_DIM": 64, "WIDEN": False, "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 64}
    pointers = {"lse_ptr": "*fp32", "received_ptr": "*fp32", "scale": "fp32"}
    kinds = [dict.fromkeys(("q_ptr", "k_ptr"), kind) for kind in ("*bf16", "*fp16", "*fp32")]
    compile_all("attend", [("observe_kernel", pointers | kind, sizes) for kind in kinds])
