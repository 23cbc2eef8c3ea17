"""A GPU's store of packed keys and values, in Triton's interpreter: it has the bits of a store of plain ones."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from offload.architecture.rope import Rope
from offload.caches.full import FullCache
from offload.kernels import triton
from offload.kernels.triton import ops
from offload.memory import device_packed_store
from offload.memory.device_packed_store import RUN, DevicePackedStore
from offload.memory.plain_store import PlainStore
from offload.memory.tree_attention import tree_of
from tests.support.interrupts import interrupted
from tests.support.offloading import CPU
from tests.support.stores import tiny_shape

pytest.importorskip("triton")
CAPACITY = 700


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """Attend to plain keys by Triton as well."""
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)
    monkeypatch.setattr(triton, "serves", lambda q: len(q) <= triton.ROWS)


@cache
def shape(layers):
    return replace(tiny_shape(), layers=layers, heads=1, kv_heads=1)


@cache
def rope():
    return Rope(shape(1), CAPACITY, torch.bfloat16, CPU)


def new_caches(layers=1):
    """Return a cache of packed and one of plain keys and values; the interpreter is slow, so few layers of one head."""
    args = shape(layers), CAPACITY, torch.bfloat16, CPU
    stores = DevicePackedStore(*args, "packed"), PlainStore(*args)
    return [FullCache(store, rope(), CAPACITY) for store in stores]


def numbers(seed, tokens, is_wild=False):
    """Return q, k and v of a layer; the exponents of wild ones do not fit 4 bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, shape(1).head_dim, generator=generator)
    if is_wild:
        x[:, 1:] *= torch.randint(-40, 1, x[:, 1:].shape, generator=generator).exp2()
    return x.bfloat16().split(1, dim=1)


def run(caches, seed, tokens, is_wild=False, tree=None, commit=True, seen=1):
    """Run a pass in all caches, of which the last `seen` tokens attend; their attention is the same."""
    q, k, v = numbers(seed, tokens, is_wild)
    rows = []
    for full in caches:
        full.begin(tokens, tree)
        for layer in range(full.store.shape.layers):
            if tree is None and seen < tokens:
                full.append(layer, *(x[: tokens - seen] for x in (q, k, v)))
            found = full.attend(layer, *(x[tokens - seen :] if tree is None else x for x in (q, k, v)))
        rows.append(found.clone())
        if commit:
            full.commit() if tree is None else full.hold()
    assert torch.equal(*rows)


def same_bits(ours, theirs):
    return torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def assert_same(caches, start=0):
    stores, end = [full.store for full in caches], caches[0].length
    assert all(same_bits(*both) for both in zip(*(store.read(start, end) for store in stores), strict=True))


def kept(store):
    """Return how many runs of each layer lie behind the ring."""
    return (store._places.runs >= store._ring).flatten(1).sum(1).tolist()


def test_a_sequence_has_the_bits_of_plain_keys():
    """Packed runs, one that does not fit, a rollback into it and into another; a tree across the ring's end."""
    caches = new_caches()
    store = caches[0].store
    for seed, tokens, is_wild in ((0, 256, False), (1, 127, True), (2, 3, False)):
        run(caches, seed, tokens, is_wild)
    run(caches, 4, 3, seen=3)
    assert store._places.counts == (3,) and kept(store) == [1]
    assert_same(caches, 250)
    parents = tree_of((-1, 0, 1, 1, 3))
    run(caches, 5, 5, tree=parents)
    for full in caches:
        full.commit([0, 1, 3, 4])
    for length in (300, 130):
        assert [full.truncate(length) for full in caches] == [length] * 2
        run(caches, 6, 2)
        assert_same(caches, length - 30)
    assert store._places.counts == (1,) and kept(store) == [0]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_every_history_has_the_bits_of_plain_keys(seed):
    rng, caches = random.Random(seed), new_caches(2)
    for step in range(25):
        length, is_wild = caches[0].length, rng.random() < 0.4
        kind = rng.choice(["pass", "pass", "long", "truncate", "tree", "abort"])
        tokens = min(rng.choice([1, 3, 20]) if kind != "long" else rng.randrange(100, 300), CAPACITY - length)
        if kind == "truncate" or CAPACITY - length < 40:
            to = rng.choice([max(length - rng.randrange(5), 0), rng.randrange(length + 1), length // RUN * RUN])
            assert [full.truncate(to) for full in caches] == [to, to]
        elif kind == "tree":
            parents = [-1, *(rng.choice([at, rng.randrange(-1, at + 1)]) for at in range(9))]
            run(caches, step, 10, is_wild, tree_of(parents))
            path = tree_of(parents).path_to(rng.randrange(10))
            for full in caches:
                full.commit(path)
        else:
            run(caches, step, tokens, is_wild, commit=kind != "abort")
        assert_same(caches)


def fill(full, seed, tokens, is_wild=False):
    full.begin(tokens)
    for layer in range(full.store.shape.layers):
        full.append(layer, *numbers(seed, tokens, is_wild))
    full.commit()


@pytest.mark.long
@pytest.mark.parametrize("step", [3])
def test_an_interrupt_changes_no_bit(step):
    """At lines of a pass which packs runs, of which one does not fit, and of one after a rollback into it."""
    for at in range(0, 10**6, step):
        ours, plain = new_caches(2)
        for full in (ours, plain):
            fill(full, 0, 250, True)
        with interrupted(at, device_packed_store, event="line") as hit:
            fill(ours, 1, 9)
            ours.truncate(100)
            fill(ours, 2, 3)
        ours.truncate(100)
        plain.truncate(100)
        for full in (ours, plain):
            fill(full, 3, 60)
        assert_same([ours, plain])
        if not hit:
            break
    assert at > 60
