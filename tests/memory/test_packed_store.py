"""A store of packed keys and values: whatever happens to a sequence, it has the bits of a store of blocks."""

import random
from functools import cache

import pytest
import torch

from offload.architecture.rope import Rope
from offload.caches.full import FullCache
from offload.memory import packed_store
from offload.memory.block_store import BlockStore
from offload.memory.packed_store import RUN, PackedStore
from offload.memory.tree_attention import tree_of
from tests.support.interrupts import interrupted
from tests.support.offloading import CPU, native_kernel
from tests.support.stores import tiny_shape

pytestmark = pytest.mark.xdist_group("native")
CAPACITY = 1500
LAYERS, KV_HEADS = 3, 2


@cache
def rope():
    return Rope(tiny_shape(), CAPACITY, torch.bfloat16, CPU)


def new_cache(kind=PackedStore):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    args = native_kernel(), tiny_shape(), CAPACITY, torch.bfloat16
    full = FullCache(kind(*args, "packed") if kind is PackedStore else kind(*args), rope(), CAPACITY)
    full.keep_queries()
    return full


def numbers(seed, tokens, wild=()):
    """Return q, k and v of each layer; those of `wild` layers' first KV head have exponents that do not fit 4 bits."""
    generator, shape = torch.Generator().manual_seed(seed), tiny_shape()
    found = []
    for layer in range(LAYERS):
        x = torch.randn(tokens, shape.heads + 2 * KV_HEADS, shape.head_dim, generator=generator)
        if layer in wild:
            x[:, shape.heads :: KV_HEADS] *= torch.randint(-40, 1, x[:, shape.heads :: KV_HEADS].shape).exp2()
        found.append(x.bfloat16().split((shape.heads, KV_HEADS, KV_HEADS), dim=1))
    return found


def run(caches, qkv, tree=None, commit=True, chunk=None):
    """Run a pass in all caches; assert that its attention is the same."""
    first, *others = [run_one(full, qkv, tree, commit, chunk) for full in caches]
    assert all(torch.equal(first, other) for other in others)


def run_one(full, qkv, tree=None, commit=True, chunk=None):
    """Run a pass, each layer `chunk` tokens at a time; return its attention."""
    tokens, rows = len(qkv[0][0]), []
    full.begin(tokens, tree, chunk)
    for layer, each in enumerate(qkv):
        parts = zip(*(x.split(chunk or tokens) for x in each), strict=True)
        rows.append(torch.cat([full.attend(layer, *part).clone() for part in parts]))
    if commit:
        full.commit() if tree is None else full.hold()
    return torch.stack(rows)


def same_bits(ours, theirs):
    return torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def assert_same(caches):
    """Assert that all that can be asked of the stores is the same."""
    packed, plain = (full.store for full in caches)
    end = caches[0].length
    assert end == caches[1].length
    assert all(same_bits(*both) for both in zip(packed.read(0, end), plain.read(0, end), strict=True))
    blocks = end // 16
    if not blocks:
        return
    assert same_bits(packed.dump(0, 16 * blocks), plain.dump(0, 16 * blocks))
    rows = torch.arange(LAYERS * KV_HEADS).repeat(3)
    chunks = torch.randint(blocks, rows.shape, generator=torch.Generator().manual_seed(end))
    pairs = zip(packed.gather(rows, chunks, 16), plain.gather(rows, chunks, 16), strict=True)
    assert all(same_bits(*both) for both in pairs)
    for layer in range(LAYERS):
        means = (store.mean_keys(layer, 0, 16 * blocks, 16) for store in (packed, plain))
        assert torch.equal(*means)
        q = numbers(end, 2)[layer][0].contiguous()
        table = torch.stack([torch.randperm(blocks, generator=torch.Generator().manual_seed(n)) for n in range(2)])
        table = table[:, :7].to(torch.int32).repeat(LAYERS, 1, 1)
        seen = 16 * table.shape[2] - 1
        outs = (s.attend_table(layer, q, s.places(table, end)[layer], seen).clone() for s in (packed, plain))
        assert torch.equal(*outs)
        lse, received = torch.empty(2, 2, 6), torch.zeros(2, KV_HEADS, CAPACITY)
        for index, store in enumerate((packed, plain)):
            store.attend(layer, q, end - 2, lse=lse[index])
            store.observe(layer, q, end - 2, lse[index], received[index])
        assert torch.equal(*lse) and torch.equal(*received)


def run_history(seed, wild, steps):
    """Run a random history in both caches, of passes, rollbacks, trees, aborted passes, and restored blocks."""
    rng = random.Random(seed)
    caches = new_cache(), new_cache(BlockStore)
    for step in range(steps):
        length, some = caches[0].length, rng.choice([(), wild])
        kind = rng.choice(["pass", "pass", "long", "truncate", "tree", "abort", "chunks", "restore"])
        tokens = min(rng.choice([1, 3, 20]) if kind != "long" else rng.randrange(100, 400), CAPACITY - length)
        if kind == "truncate" or CAPACITY - length < 60:
            to = rng.choice([max(length - rng.randrange(5), 0), rng.randrange(length + 1), length // RUN * RUN])
            assert [full.truncate(to) for full in caches] == [to, to]
        elif kind == "tree":
            parents = [-1, *(rng.choice([at, rng.randrange(-1, at + 1)]) for at in range(19))]
            qkv, first = numbers(step, 20, some), rng.randrange(1, 20)
            run(caches, [[x[:first] for x in each] for each in qkv], tree_of(parents[:first]))
            if first < 20:
                run(caches, [[x[first:] for x in each] for each in qkv], tree_of(parents))
            path = tree_of(parents).path_to(rng.randrange(20))
            path = path[: rng.choice([len(path), 1])]
            for full in caches:
                full.commit(path)
        elif kind == "restore" and length % 16 == 0:
            bits = torch.randn(LAYERS, KV_HEADS, rng.randrange(1, 20), 2 * 16 * 32).bfloat16()
            bits = bits[:, :, : (CAPACITY - length) // 16]
            for full in caches:
                full.restore(bits.shape[2] * 16, bits)
        else:
            chunk = 64 if kind == "chunks" else None
            tokens = min(300, CAPACITY - length) if chunk else tokens
            run(caches, numbers(step, tokens, some), commit=kind != "abort", chunk=chunk)
        assert_same(caches)
    return caches


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
@pytest.mark.parametrize("wild", [(), (0, 2)], ids=["usual", "wild layers"])
def test_every_history_has_the_bits_of_blocks(seed, wild):
    run_history(seed, wild, steps=24 if seed else 12)


def test_runs_that_do_not_fit_stay_behind_the_ring_and_others_are_packed():
    caches = new_cache(), new_cache(BlockStore)
    for seed, wild in ((0, ()), (1, (1,)), (2, (1,)), (3, ())):
        run(caches, numbers(seed, 2 * RUN, wild))
    run(caches, numbers(4, 1))
    places, ring = caches[0].store._places[:, :, :: RUN // 16], caches[0].store._plain.ring
    kept = (places >= ring).sum(2)
    assert kept.tolist() == [[0, 0], [4, 0], [0, 0]]
    assert int((places < 0).sum()) == 8 * LAYERS * KV_HEADS - 4
    assert_same(caches)
    for length in (700, 600, 300, 0):
        [full.truncate(length) for full in caches]
        run(caches, numbers(5, 1))
        assert_same(caches)
    assert (caches[0].store._places < ring).all() and (caches[0].store._places >= 0).all()


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_any_bits_come_back(share):
    """NaN, infinities, subnormals, zeros, in a share of the blocks; also after rollbacks into packed runs."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (LAYERS, KV_HEADS, 60, 1024), generator=generator, dtype=torch.int16)
    usual = torch.randn(bits.shape, generator=generator).bfloat16().view(torch.int16)
    bits = torch.where(torch.rand(LAYERS, KV_HEADS, 60, 1, generator=generator) < share, bits, usual)
    bits[..., ::31] = torch.tensor([0.0, -0.0, 1e-40, float("inf")]).bfloat16().view(torch.int16)[int(3 * share)]
    bits, store, plain = bits.view(torch.bfloat16), new_cache().store, new_cache(BlockStore).store
    store.load(0, bits)
    plain.load(0, bits)
    assert same_bits(store.dump(0, 960), bits)
    for block in (56, 43, 8, 1):
        store.truncate(16 * block)
        store.load(16 * block, bits[:, :, -3:])
        plain.load(16 * block, bits[:, :, -3:])
        end = 16 * block + 48
        assert same_bits(store.dump(0, end), plain.dump(0, end))
        assert all(same_bits(*both) for both in zip(store.read(21, end), plain.read(21, end), strict=True))


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
def test_an_interrupt_changes_no_bit(step):
    """At lines of a pass which packs a run, and of one after a rollback into it."""
    qkv = [numbers(seed, tokens, (0,)) for seed, tokens in enumerate((200, 140, 3))]
    expected = new_cache(BlockStore)
    run_one(expected, qkv[0])
    expected.truncate(100)
    rows, kept = run_one(expected, qkv[1]), expected.store.read(0, 240)
    for at in range(0, 10**6, step):
        full = new_cache()
        run_one(full, qkv[0])
        with interrupted(at, packed_store, event="line") as hit:
            run_one(full, qkv[1])
            full.truncate(100)
            run_one(full, qkv[2])
        full.truncate(100)
        assert torch.equal(run_one(full, qkv[1]), rows), hit
        assert all(same_bits(*both) for both in zip(full.store.read(0, 240), kept, strict=True)), hit
        if not hit:
            break
    assert at > 200
