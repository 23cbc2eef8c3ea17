"""Packed pages over tiers: the bits of pages as they are, whatever travels packed."""

from functools import cache

import pytest
import torch

from offload.architecture.rope import Rope
from offload.caches.full import FullCache
from offload.kernels.native.ops import NativeOperations
from offload.memory.factory import TieredStoreFactory
from offload.settings.kv_formats import BF16
from tests.support.offloading import CPU, make_link, native_kernel, settings
from tests.support.stores import tiny_shape

pytestmark = pytest.mark.xdist_group("native")
PAGE, CAPACITY = 512, 1500
LAYERS, KV_HEADS = 3, 2


@cache
def rope():
    return Rope(tiny_shape(), CAPACITY, torch.bfloat16, CPU)


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


def run(caches, qkv):
    """Run a pass in all caches; assert that its attention is the same."""
    found = []
    for full in caches:
        full.begin(len(qkv[0][0]))
        found.append(torch.stack([full.attend(layer, *each).clone() for layer, each in enumerate(qkv)]))
        full.commit()
    assert all(torch.equal(found[0], other) for other in found)


def same_bits(ours, theirs):
    return torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def new_caches(**placement):
    """Return full caches of packed pages and of pages as they are, and their links."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    caches, links = [], []
    for kv in ("packed", BF16):
        links.append(make_link())
        tiers = settings(page_tokens=PAGE, **placement)
        factory = TieredStoreFactory(NativeOperations(native_kernel()), CPU, tiers, links[-1], kv=kv)
        caches.append(FullCache(factory.new_store(tiny_shape(), CAPACITY, torch.bfloat16), rope(), CAPACITY))
    return caches, links


@pytest.mark.parametrize("wild", [(), (1,)], ids=["packed", "a layer that cannot be packed"])
@pytest.mark.parametrize("mode", ["stream", "host", "hybrid"])
def test_passes_have_the_bits_of_plain_pages(mode, wild):
    """Of a prompt, single tokens, rollbacks into pages that were packed, and tokens that were restored."""
    caches, _ = new_caches(mode=mode)
    for step, tokens in enumerate([1100, 1, 3, -700, 5, 700, -80, 1, 120]):
        if tokens < 0:
            for full in caches:
                full.truncate(full.length + tokens)
        else:
            run(caches, numbers(step, tokens, wild))
    end = caches[0].length
    pairs = zip(*(full.store.read(0, end) for full in caches), strict=True)
    assert all(same_bits(*both) for both in pairs)
    rows, chunks = (
        torch.arange(6).repeat(4),
        torch.randint(end // 16, (24,), generator=torch.Generator().manual_seed(0)),
    )
    pairs = zip(*(full.store.gather(rows, chunks, 16) for full in caches), strict=True)
    assert all(same_bits(*both) for both in pairs)
    dumps = [full.store.dump(256, 640) for full in caches]
    assert same_bits(*dumps)
    for full, kv in zip(caches, dumps, strict=True):
        full.truncate(256)
        full.restore(384, kv)
    run(caches, numbers(99, 4, wild))


@pytest.mark.parametrize(("wild", "share"), [((), 0.79), ((0, 1, 2), 1.0)])
def test_a_pass_copies_three_quarters_of_the_bytes(wild, share):
    caches, links = new_caches(mode="stream")
    run(caches, numbers(0, 1100, wild))
    copied = []
    for full, link in zip(caches, links, strict=True):
        run([full], numbers(1, 1, wild))
        link.finish(link.copy(()))  # what is prefetched
        before = link.statistics.bytes
        run([full], numbers(2, 1, wild))
        link.finish(link.copy(()))
        copied.append(link.statistics.bytes - before)
    assert 0.95 * share < copied[0] / copied[1] <= share
