"""The block store: any history of appends is read back, and attention equals the plain store's."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.architecture.hf_config import shape_from_config
from offload.architecture.rope import Rope, rotate
from offload.kernels.native.layout import keys_of, mean_keys, values_of
from offload.memory.block_store import BlockStore
from offload.memory.plain_store import PlainStore
from offload.memory.tree_attention import tree_of
from tests.support.models import make_hf_model
from tests.support.native_kernel import DTYPES, definition, distance, draw, fill_blocks
from tests.support.offloading import native_kernel

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_equals_the_plain_store_s(kernel, dtype, head_dim):
    """Both get the identity rotation, because torch rounds in the middle of a rotation."""
    shape = shape_of(head_dim)
    ours, plain = BlockStore(kernel, shape, CAPACITY, dtype), PlainStore(shape, CAPACITY, dtype, CPU)
    start = 0
    for tokens in (1, 15, 1, 33, 2, 48):
        rows = torch.ones(tokens, 1, head_dim, dtype=dtype), torch.zeros(tokens, 1, head_dim, dtype=dtype)
        q, k, v = projected(shape, tokens, dtype, start)
        mine, theirs = (store.append(1, start, q, k, v, rows) for store in (ours, plain))
        assert torch.equal(mine, theirs)
        found, expected = ours.attend(1, mine, start), plain.attend(1, theirs, start)
        assert found.dtype == expected.dtype
        assert distance(found, expected.double()) < (5e-3 if dtype == torch.bfloat16 else 1e-5)
        start += tokens
    for a, b in zip(ours.read(0, start), plain.read(0, start), strict=True):
        assert torch.equal(a[1], b[1])
    means = [store.mean_keys(1, 16, 96, 16) for store in (ours, plain)]
    assert torch.allclose(*means, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_by_a_block_table(kernel, dtype):
    shape = shape_of(64)
    store, rope = BlockStore(kernel, shape, CAPACITY, dtype), new_rope(shape, dtype)
    rows = rope.rows(0, 90)
    q = store.append(0, 0, *projected(shape, 90, dtype, 0), rows)[-2:].clone()
    table = torch.tensor([[4, 0, 5, 1], [2, 3, 5, 1]], dtype=torch.int32)
    seen = 2 * 16 + 9  # the first token sees up to position 88
    positions = [[block * 16 + i for block in row[:3] for i in range(16)][: seen + 1] for row in table.tolist()]
    keys, values = store.read(0, 90)
    picked = [torch.stack([x[0, head, positions[head]] for head in range(2)]) for x in (keys, values)]
    found = store.attend_table(0, q, table, seen)
    assert distance(found, definition(q, *picked, seen)[0]) < (5e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")
@pytest.mark.parametrize("keep", [[], [0], [0, 1, 2], [0, 2], [1, 2, 5, 18, 30], [29]], ids=str)
def test_a_kept_path_is_moved_together(dtype, keep):
    """In every layer and head, and nothing else moves."""
    shape = shape_of(32)
    store = BlockStore(native_kernel(), shape, CAPACITY, dtype)  # whose level does not matter: torch moves
    size = shape.layers, shape.kv_heads, CAPACITY, shape.head_dim
    expected = [draw(*size, dtype=dtype, seed=seed) for seed in (0, 1)]
    for start in (0, 13, 47):
        store.write(0, *expected)
        store.compact(start, keep)
        for x, found in zip(expected, store.read(0, CAPACITY), strict=True):
            x[:, :, start : start + len(keep)] = x[:, :, [start + i for i in keep]]
            assert torch.equal(found, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tree_attends_as_the_chains_of_its_paths(kernel, dtype):
    """In place and by a table, and behind a path that was kept."""
    shape, start, path = shape_of(64), 37, [0, 2, 4, 5]
    branches = tree_of((-1, 0, 0, 1, 2, 4))
    tree, chain = (BlockStore(kernel, shape, CAPACITY, dtype) for _ in range(2))
    kv = [draw(shape.layers, shape.kv_heads, start + len(branches), 64, dtype=dtype, seed=seed) for seed in (1, 2)]
    q = draw(len(branches), shape.heads, 64, dtype=dtype)
    tree.write(0, *kv)
    chain.write(0, *(x[:, :, [*range(start), *(start + token for token in path)]] for x in kv))
    table = torch.tensor([[1, 0, 2], [0, 1, 2]], dtype=torch.int32)
    assert torch.equal(tree.attend(1, q, start, branches)[path], chain.attend(1, q[path], start))
    found = tree.attend_table(1, q, table, start + 1, branches)[path]
    assert torch.equal(found, chain.attend_table(1, q[path], table, start + 1))
    tree.compact(start, path)
    last = start + len(path) - 1
    assert torch.equal(tree.attend(1, q[:1], last), chain.attend(1, q[:1], last))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_keys_and_values_are_read_back_from_blocks(dtype, head_dim):
    k, v = (draw(2, 64, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    blocks = fill_blocks(k, v)
    assert torch.equal(keys_of(blocks, head_dim).flatten(1, 2), k)
    assert torch.equal(values_of(blocks, head_dim).flatten(1, 2), v)
    means = k.double().unflatten(1, (-1, 16)).mean(2)
    assert torch.allclose(mean_keys(blocks, head_dim).double(), means, rtol=0, atol=1e-6)
