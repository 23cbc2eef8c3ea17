"""A GPU's packed pages over tiers, in Triton's interpreter: the bits of pages as they are, whatever travels packed."""

import pytest
import torch

from offload.architecture.pages import host_page_bytes, staging_bytes
from offload.caches.full import FullCache
from offload.kernels import triton
from offload.kernels.ops import TorchOperations
from offload.kernels.triton import ops
from offload.memory.device_packed_pages import DevicePackedPageFormat
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_attention import HostAttention
from offload.memory.page import BlockPageFormat
from offload.memory.tree_attention import tree_of
from offload.settings.kv_formats import BF16
from tests.memory.test_device_packed_store import CAPACITY, numbers, rope, run, same_bits, shape
from tests.support.offloading import CPU, make_link, native_kernel, settings

pytest.importorskip("triton")
pytestmark = pytest.mark.xdist_group("native")
PAGE = 256  # of smaller ones, packed ones are as large: whole sectors
PLACES = {"stream": {"mode": "stream"}, "host": {"mode": "host"}, "hybrid": {"mode": "hybrid", "copy_bytes": 2**20}}


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)
    monkeypatch.setattr(triton, "serves", lambda q: len(q) <= triton.ROWS)


class PlainFactory(TieredStoreFactory):
    """Makes on a CPU what a GPU has: blocks that Triton attends to, and sums of the host's results."""

    def _stored_format(self, shape, dtype):
        return BlockPageFormat(shape, PAGE, native_kernel()), dtype

    def _host(self, format):
        return HostAttention(format, CPU, sums=True)


def new_caches(layers=1, new_link=make_link, **placement):
    """Return caches of packed pages and of pages as they are, and their links, which are late."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    caches, links = [], []
    for kind, kv in ((TieredStoreFactory, "packed"), (PlainFactory, BF16)):
        links.append(new_link())
        factory = kind(TorchOperations(), CPU, settings(page_tokens=PAGE, **placement), links[-1], kv=kv)
        caches.append(FullCache(factory.new_store(shape(layers), CAPACITY, torch.bfloat16), rope(), CAPACITY))
    assert isinstance(caches[0].store.format, DevicePackedPageFormat)
    return caches, links


def assert_same(caches):
    end = caches[0].length
    pairs = zip(*(full.store.read(0, end) for full in caches), strict=True)
    assert all(same_bits(*both) for both in pairs)
    chunks = torch.arange(end // 16)
    pairs = zip(*(full.store.gather(chunks * 0, chunks, 16) for full in caches), strict=True)
    assert all(same_bits(*both) for both in pairs)
    assert same_bits(*(full.store.dump(0, end // 16 * 16) for full in caches))
    assert torch.equal(*(full.store.mean_keys(0, 0, end // 16 * 16, 16) for full in caches))


@pytest.mark.daily("hybrid")
@pytest.mark.parametrize("place", PLACES)
def test_passes_have_the_bits_of_plain_pages(place):
    """Of a prompt, of pages that cannot be packed, single tokens, trees, and rollbacks into pages that were packed."""
    caches, _ = new_caches(**PLACES[place])
    run(caches, 0, 270)
    run(caches, 1, 250, is_wild=True)
    run(caches, 2, 1)
    run(caches, 3, 3, tree=tree_of((-1, 0, 0)), commit=False)
    for full in caches:
        full.hold()
        full.commit([0, 2])
    run(caches, 4, 2, seen=2)
    tiers = caches[0].store.tiers
    assert tiers.num_whole == 2 and (0, 0) not in tiers.pages._plain and (0, 1) in tiers.pages._plain
    assert_same(caches)
    for full in caches:
        full.truncate(200)
    run(caches, 5, 320)
    run(caches, 6, 80, seen=70)  # more rows than Triton attends with
    assert tiers.num_whole == 2 and not {(0, 0), (0, 1)} & {*tiers.pages._plain}
    assert_same(caches)


@pytest.mark.long
def test_layer_by_layer_a_prompt_has_the_bits_of_plain_pages():
    caches, _ = new_caches()
    run(caches, 0, 300)
    for full in caches:
        full.store.tiers.prefills_plainly = True
        full.begin(240, chunk=128)
    new, rows = numbers(1, 240), []
    for full in caches:
        chunks = zip(*(x.split(128) for x in new), strict=True)
        rows.append(torch.cat([full.attend(0, *chunk).clone() for chunk in chunks]))
        full.commit()
    assert torch.equal(*rows)
    run(caches, 2, 1)
    assert_same(caches)


def test_what_it_allocates_is_what_is_counted():
    caches, _ = new_caches()
    tiers = caches[0].store.tiers
    assert tiers.pages.stored.nbytes == host_page_bytes(shape(1), 1, CAPACITY, PAGE, 2, "packed")
    staged = tiers.open.nbytes + sum(buffer.nbytes for buffer in tiers.ring.buffers)
    assert staged <= staging_bytes(shape(1), 1, 2, PAGE, 2)
