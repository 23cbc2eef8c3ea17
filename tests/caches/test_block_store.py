"""The block store: any history of appends is read back, and attention equals the plain store's."""

from dataclasses import replace
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.architecture.hf_config import shape_from_config
from offload.architecture.rope import Rope, rotate
from offload.memory.block_store import BlockStore
from tests.support.models import make_hf_model
from tests.support.native_kernel import DTYPES, draw

CPU = torch.device("cpu")
CAPACITY = 100


@cache
def _tiny():
    return shape_from_config(make_hf_model("llama").config.to_dict(), {})


def shape_of(head_dim=16, kv_heads=2, group=3):
    return replace(_tiny(), heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim)


def new_rope(shape, dtype):
    return Rope(shape, CAPACITY, dtype, CPU)


def projected(shape, tokens, dtype, seed):
    """Return q, k and v of some tokens as views of one tensor, as the model computes them."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return draw(tokens, sum(heads), shape.head_dim, dtype=dtype, seed=seed).split(heads, dim=1)


def rotated(x, rows):
    return rotate(x.double(), tuple(part.double() for part in rows))


def close(found, expected):
    """Compare up to one unit in the last place."""
    return torch.allclose(found.double(), expected, rtol=2**-8 if found.dtype == torch.bfloat16 else 2**-20, atol=1e-6)


STEPS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(STEPS, st.sampled_from(DTYPES), st.sampled_from([16, 48, 80]), st.integers(0, 1))
def test_any_history_of_appends_is_read_back(kernel, steps, dtype, head_dim, layer):
    """Steps begin at any stored token and overwrite what follows, except their first `stored` tokens."""
    shape = shape_of(head_dim)
    store, rope = BlockStore(kernel, shape, CAPACITY, dtype), new_rope(shape, dtype)
    expected = torch.zeros(2, shape.kv_heads, CAPACITY, head_dim, dtype=torch.float64)
    length = 0
    for seed, (start, tokens, stored) in enumerate(steps):
        start %= length + 1
        end = min(start + tokens, CAPACITY)
        stored = min(stored, length - start, end - start)
        if start == end:
            continue
        q, k, v = projected(shape, end - start, dtype, seed)
        rows = rope.rows(start, end)
        assert close(store.append(layer, start, q, k, v, rows, stored), rotated(q, rows))
        expected[0, :, start + stored : end] = rotated(k, rows)[stored:].transpose(0, 1)
        expected[1, :, start + stored : end] = v[stored:].transpose(0, 1)
        length = max(length, end)
        keys, values = store.read(0, CAPACITY)
        assert close(keys[layer], expected[0])
        assert torch.equal(values[layer].double(), expected[1])
        assert not keys[1 - layer].any() and not values[1 - layer].any()
        for ours, all_of_them in zip(store.read(start, end), (keys, values), strict=True):
            assert torch.equal(ours, all_of_them[:, :, start:end])
    means = expected[0, :, :96].unflatten(1, (-1, 32)).mean(2)
    assert torch.allclose(store.mean_keys(layer, 0, 96, 32).double(), means, rtol=0, atol=1e-2)
