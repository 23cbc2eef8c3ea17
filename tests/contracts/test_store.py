"""The contract of `Store` (offload/memory/store.py), for every store in every placement."""

from functools import lru_cache
from inspect import isabstract
from itertools import product

import pytest
import torch

from offload.architecture.kv_formats import WINDOW
from offload.kernels.triton import ops
from offload.memory.block_store import BlockRing
from offload.memory.store import Store
from tests.support.stores import (
    ERRORS,
    ON_GPU,
    PACKED_ON_GPU,
    PACKED_TIERS,
    QUANTIZED,
    SOME_STORES,
    STORES,
    close,
    definition,
    new_rope,
    new_store,
    projected,
    quantization,
    rotated,
    tiny_shape,
)

PASSES = [1, 40, 3, 70, 1, 5, 80, 90]  # tokens: within a page of 32, across its border, and longer than two
LENGTH = sum(PASSES)
IDS = [(7 * position) % 251 for position in range(LENGTH)]
ALL = [*STORES, "paged", *QUANTIZED, *(pytest.param(name, marks=pytest.mark.long) for name in ON_GPU)]
PACKED_BF16 = pytest.param(f"{PACKED_ON_GPU} bf16", marks=pytest.mark.long)


@pytest.fixture(
    params=[
        *ALL,
        *(f"{name} bf16" for name in (*SOME_STORES, "paged", QUANTIZED[1], *PACKED_TIERS)),
        PACKED_BF16,
    ]
)
def name(request, monkeypatch):
    if request.param in (*ON_GPU, f"{PACKED_ON_GPU} bf16"):
        pytest.importorskip("triton")
        monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)  # its interpreter is slow
    return request.param


@pytest.fixture
def error(name):
    return ERRORS.get(quantization(name), 0.0)


@pytest.fixture
def unit(name):
    """The tokens that are dumped together."""
    return WINDOW if quantization(name) in ERRORS else 16


@pytest.fixture
def chunk(store):
    return max(store.least_chunk, 16)


@pytest.fixture
def kind(name):
    return name.removesuffix(" bf16")


@pytest.fixture
def dtype(name):
    return torch.bfloat16 if name.endswith(" bf16") else torch.float32


@pytest.fixture
def store(kind, dtype):
    return new_store(kind, dtype)


@pytest.fixture
def rope(dtype):
    return new_rope(dtype)


@pytest.fixture(scope="module")
def filled_stores():
    """The filled store of each name: filling takes longer than reading."""
    return {}


@pytest.fixture
def filled(name, kind, dtype, rope, filled_stores):
    """A store with all tokens, which other tests read too: none may change it."""
    if name not in filled_stores:
        filled_stores[name] = new_store(kind, dtype)
        fill(filled_stores[name], rope)
    return filled_stores[name]


def run(store, rope, ids, start, end=True):
    """Run a pass over `ids[start:]`; return rotated queries and attention, each `[layers, tokens, heads, head_dim]`."""
    new, queries, rows = ids[start:], [], []
    store.begin(start, len(new))
    for layer in range(store.shape.layers):
        q = store.append(layer, start, *projected(new, layer, store.dtype), rope.rows(start, len(ids)))
        queries.append(q.clone())
        rows.append(store.attend(layer, q, start).clone())
    if end:
        store.end()
    return torch.stack(queries), torch.stack(rows)


def fill(store, rope, ids=IDS, passes=PASSES):
    start = 0
    for tokens in passes:
        run(store, rope, ids[: start + tokens], start)
        start += tokens


def keys_and_values(ids, rope, dtype):
    """Return the keys and values of tokens, each `[layers, kv_heads, tokens, head_dim]` in fp64."""
    return _keys_and_values(tuple(ids), rope, dtype)


@lru_cache
def _keys_and_values(ids, rope, dtype):
    both = []
    for layer in range(tiny_shape().layers):
        _, k, v = projected(ids, layer, dtype)
        both.append([rotated(k, rope, list(range(len(ids)))).transpose(0, 1), v.double().transpose(0, 1)])
    return [torch.stack(x) for x in zip(*both, strict=True)]


def contains(store, rope, ids, error=0.0):
    pairs = zip(store.read(0, len(ids)), keys_and_values(ids, rope, store.dtype), strict=True)
    return all(close(found, expected, error) for found, expected in pairs)


def subclasses(kind):
    return {each for child in kind.__subclasses__() for each in (child, *subclasses(child))}


def test_every_store_is_here():
    """But rings, which have the newest tokens alone: tests/caches/test_windows.py."""
    stores = [new_store(name) for name in (*SOME_STORES, "paged", *QUANTIZED, *ON_GPU)]
    stores += [new_store(name, torch.bfloat16) for name in (PACKED_ON_GPU, *PACKED_TIERS)]
    kinds = {each for each in subclasses(Store) if not isabstract(each) and "evaluation" not in each.__module__}
    assert {type(each) for each in stores} == kinds - {BlockRing}


def test_append_returns_rotated_queries_and_each_token_attends_to_all_before_it_and_itself(store, rope, dtype, error):
    start = 0
    for tokens in PASSES:
        end = start + tokens
        queries, rows = run(store, rope, IDS[:end], start)
        for layer, (rotation, found) in enumerate(zip(queries, rows, strict=True)):
            q, _, _ = projected(IDS[start:end], layer, dtype)
            assert close(rotation, rotated(q, rope, list(range(start, end))))
            assert found.dtype == dtype
            assert close(found, definition(IDS[:end], start, layer, rope, dtype), error)
        start = end


def test_what_was_appended_is_read_back_in_every_layer(filled, rope, error):
    assert contains(filled, rope, IDS, error)


def test_truncated_tokens_are_replaced_by_the_next_pass(store, rope, dtype, error):
    fill(store, rope)
    for length in (150, 96, 33):  # inside a page, on its border, pages before
        store.truncate(length)
        ids = [*IDS[:length], *(250 - token for token in IDS[length : length + 50])]
        _, rows = run(store, rope, ids, length)
        assert close(rows[2], definition(ids, length, 2, rope, dtype), error)
        assert contains(store, rope, ids, error)


def test_an_aborted_pass_changes_no_earlier_token(store, rope, dtype, error):
    """Wherever it begins, of any size; after the last one, tokens are appended again."""
    start = 0
    for length, tokens in ((100, 1), (128, 100), (160, 50)):
        run(store, rope, IDS[:length], start)
        run(store, rope, [*IDS[:length], *[9] * tokens], length, end=False)
        ids, start = IDS[: length + 5], length + 5
        _, rows = run(store, rope, ids, length)
        assert all(close(found, definition(ids, length, layer, rope, dtype), error) for layer, found in enumerate(rows))
        assert contains(store, rope, ids, error)


def test_what_was_dumped_can_be_loaded_by_a_store_of_its_kind(kind, filled, rope, dtype, error, unit):
    for start, end in ((0, 144), (48, 144), (64, 144)) if unit == 16 else ((0, 2 * unit), (unit, 2 * unit)):
        dumped = filled.dump(start, end)
        assert dumped.device.type == "cpu" and dumped.is_contiguous()
        assert dumped.shape[:2] == (filled.shape.layers, filled.shape.kv_heads)
        other = new_store(kind, dtype)
        if start:
            fill(other, rope, passes=[start])
        other.load(start, dumped)
        dumped.zero_()
        for ours, theirs in zip(other.read(0, end), filled.read(0, end), strict=True):
            assert torch.equal(ours, theirs)
        assert contains(filled, rope, IDS, error)
        _, rows = run(other, rope, IDS[: end + 3], end)
        assert close(rows[1], definition(IDS[: end + 3], end, 1, rope, dtype), error)


def test_compact_moves_the_tokens_of_a_path_behind_the_prefix(store, rope, dtype, error):
    """And the next pass goes on from there; the path completes a window."""
    fill(store, rope)
    store.truncate(250)
    moved = [0, 1, 3, 4, 6, 9, 14]
    run(store, rope, [*IDS[:250], *(IDS[moved.index(at)] if at in moved else 9 for at in range(15))], 250)
    store.compact(250, moved)
    both = store.read(0, 257)
    for found, exact in zip(both, keys_and_values(IDS[:250], rope, dtype), strict=True):
        assert close(found[:, :, :250], exact, error)
    _, values = both
    _, expected = keys_and_values([*IDS[:250], *IDS[:7]], rope, dtype)
    assert close(values, expected, error)


def test_gather_gives_copies_of_chunks_by_layer_and_head(filled, rope, dtype, error, chunk):
    rows, chunks = torch.tensor([0, 1, 2, 3, 4, 5, 5]), torch.tensor([0, 3, 8, 7, 2, 1, 6])
    for _ in range(2):
        found = filled.gather(rows, chunks, chunk)
        for got, everything in zip(found, keys_and_values(IDS, rope, dtype), strict=True):
            expected = everything.flatten(0, 1)[:, : 9 * chunk].unflatten(1, (-1, chunk))[rows, chunks]
            assert close(got, expected, error)
            got.zero_()  # a copy: the store must not change


def test_what_was_gathered_is_put_into_other_chunks_of_a_near_store(filled, rope, dtype, error, chunk):
    near = filled.new_device_store(4 * chunk)
    rows, chunks = torch.arange(6).repeat_interleave(4), torch.tensor([5, 0, 3, 8] * 6)
    positions = torch.tensor([3, 2, 0, 1] * 6)
    near.put(rows, positions, chunk, *filled.gather(rows, chunks, chunk))
    wanted = [at * chunk + token for at in (3, 8, 0, 5) for token in range(chunk)]
    for found, everything in zip(near.read(0, 4 * chunk), keys_and_values(IDS, rope, dtype), strict=True):
        assert close(found, everything[:, :, wanted], error)


def test_mean_keys_are_the_means_of_whole_chunks_in_fp32(filled, rope, dtype, error, chunk):
    keys, _ = keys_and_values(IDS, rope, dtype)
    for layer, (first, last) in product(range(3), ((0, 9), (3, 7), (8, 9))):
        start, end = first * chunk, last * chunk
        found = filled.mean_keys(layer, start, end, chunk)
        assert found.dtype == torch.float32
        expected = keys[layer][:, start:end].unflatten(1, (-1, chunk)).mean(2)
        assert (found.double() - expected).abs().max() < max(2e-2 if dtype == torch.bfloat16 else 1e-5, error)
