"""Prefill layer by layer over plain keys, as on a GPU, against the same prefill page by page; on a simulated link."""

import gc
from weakref import ref

import pytest
import torch

from offload import Speculation
from offload.architecture.rope import Rope
from offload.architecture.tier_footprint import host_mean_key_bytes, host_page_bytes, staging_bytes
from offload.caches.factory import selected_cache
from offload.kernels.native.structs import BLOCK
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.memory import factory
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import TransferFailed
from offload.memory.page import BlockPageFormat, PlainPageFormat
from offload.memory.tiers import Tiers
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import (
    CAPACITY,
    CPU,
    PAGE,
    SHAPE,
    make_link,
    make_model,
    native_kernel,
    random_delays,
    settings,
    tiered_cache,
)

CHUNK = 50
PASSES = [(0, 400, CHUNK), (400, 3, None)]  # start, tokens, chunk
CONTINUED = [(0, 90, None), (90, 401, CHUNK), (491, 2, None)]  # behind a whole page and a begun one


class DeviceBlocks(BlockPageFormat):
    """A GPU's pages, to whose "host" queries on the CPU need not be sent."""

    @property
    def host(self):
        return self


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    make_hf_model("llama", **SHAPE).save_pretrained(folder)
    return FolderCheckpoint(folder).shape


@pytest.fixture(params=["plain", "blocks-fp32", "blocks-bf16"])
def new_store(request, shape, monkeypatch):
    """Return a function that makes a store of one of the page formats of a GPU."""
    if request.param == "plain":
        format = PlainPageFormat(shape, PAGE)
    elif (kernel := native_kernel()) is None:
        pytest.skip("there is no native kernel here")
    else:
        format = DeviceBlocks(shape, PAGE, kernel)
    monkeypatch.setattr(factory.TieredStoreFactory, "_stored_format", lambda _, shape, dtype: (format, dtype))
    dtype = torch.bfloat16 if request.param.endswith("bf16") else torch.float32

    def new(plainly, mode="stream", resident=0, link=None):
        link = link or make_link(before=random_delays(1))
        stores = TieredStoreFactory(TorchOperations(), CPU, settings(mode, resident), link)
        store = stores.new_store(shape, CAPACITY, dtype)
        store.tiers.prefills_plainly = plainly
        return store

    return new


def run_pass(store, start, tokens, chunk, seed=0):
    """Run a pass over random queries, keys and values; return what attention returns."""
    shape, draw = store.shape, torch.Generator().manual_seed(start + seed)
    rows, found = Rope(shape, CAPACITY, store.dtype, CPU).rows(start, start + tokens), []
    store.begin(start, tokens, chunk)
    for layer in range(shape.layers):
        size = (tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        all_heads = torch.randn(size, generator=draw).to(store.dtype)
        at = start
        for part in all_heads.split(chunk or tokens):
            q, k, v = part.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
            rotations = tuple(row[at - start : at - start + len(q)] for row in rows)
            q = store.append(layer, at, q, k, v, rotations)
            found.append(store.attend(layer, q, at).clone())
            at += len(q)
    store.end()
    return torch.cat(found)


def close(store, found, expected):
    tolerance = {"rtol": 0.02, "atol": 0.02} if store.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.daily("plain-*-fresh", "blocks-fp32-*-continued", "blocks-bf16-stream-0-*")
@pytest.mark.parametrize("passes", [PASSES, CONTINUED], ids=["fresh", "continued"])
@pytest.mark.parametrize(("mode", "resident"), [("stream", 0), ("hybrid", 1), ("host", 0)])
def test_a_plain_prefill_is_the_same_prefill_and_leaves_the_same_pages(new_store, passes, mode, resident):
    plain, paged = (new_store(plainly, mode, resident) for plainly in (True, False))
    for each in passes:
        found, expected = (run_pass(store, *each) for store in (plain, paged))
        close(plain, found, expected)
    end = sum(passes[-1][:2])
    for found, expected in zip(plain.read(0, end), paged.read(0, end), strict=True):
        assert torch.equal(found, expected)


def test_whole_pages_are_streamed_once_a_layer(new_store):
    link = make_link()
    store = new_store(True, link=link)
    run_pass(store, 0, 256, CHUNK)
    before = link.statistics.bytes
    run_pass(store, 256, 200, CHUNK)
    page = store.tiers.format.numbers * store.dtype.itemsize
    store.tiers.ring.drop()
    written, ahead = 4, 2  # pages of 64 tokens; the next pass's first pages
    assert link.statistics.bytes - before <= (store.shape.layers * (256 // PAGE + written) + ahead) * page


def test_an_aborted_prefill_leaves_committed_tokens_intact(new_store):
    cable = []

    def fail(pairs):
        if cable:
            raise OSError("the cable is loose")

    store, expected = new_store(True, link=make_link(before=fail)), new_store(True)
    store.keep_mean_keys(BLOCK)
    for each in (store, expected):
        run_pass(each, *CONTINUED[0])
    cable.append("loose")
    with pytest.raises(TransferFailed, match="the cable is loose"):
        run_pass(store, *CONTINUED[1], seed=7)
    cable.clear()
    for each in CONTINUED[1:]:
        close(store, run_pass(store, *each), run_pass(expected, *each))


@pytest.fixture
def fetched(monkeypatch):
    """The bytes of each copy from host memory for mean keys."""
    sizes, fetch = [], Tiers.to_device
    monkeypatch.setattr(Tiers, "on_device", lambda tiers, x: sizes.append(x.nbytes) or fetch(tiers, x))
    return sizes


@pytest.mark.parametrize("chunk", [BLOCK, PAGE])
def test_mean_keys_are_made_by_the_prefill(new_store, fetched, chunk):
    store, paged = new_store(True, resident=1), new_store(False, resident=1)
    store.keep_mean_keys(chunk)
    for each in (store, paged):
        for part in CONTINUED:
            run_pass(each, *part)
    whole = 491 // chunk * chunk
    for layer in range(3):
        expected = paged.mean_keys(layer, 0, whole, chunk)
        fetched.clear()
        found = [store.mean_keys(layer, *borders, chunk) for borders in ((0, 128), (128, whole))]
        close(store, torch.cat(found, dim=1), expected)
        if layer:
            assert sum(fetched) == expected.numel() * store.dtype.itemsize


def test_a_prefill_has_waited_for_all_that_it_copies_to_the_host(new_store, monkeypatch):
    link, copied, waited = make_link(), [], []
    copy, wait = link.copy, link.wait
    monkeypatch.setattr(link, "copy", lambda *args: copied.append(copy(*args)) or copied[-1])
    monkeypatch.setattr(link, "wait", lambda ticket: waited.append(ticket) or wait(ticket))
    store = new_store(True, link=link)
    store.keep_mean_keys(BLOCK)
    run_pass(store, 0, 400, CHUNK)
    assert len(copied) > 2 * store.shape.layers  # pages and mean keys of each layer
    assert all(any(each is ticket for each in waited) for ticket in copied)


def test_mean_keys_of_tokens_that_changed_are_computed_again(new_store):
    store, fresh = new_store(True), new_store(False)
    store.keep_mean_keys(BLOCK)
    run_pass(store, 0, 400, CHUNK)
    run_pass(fresh, 0, 400, CHUNK)
    for each in (store, fresh):
        each.truncate(200)
        run_pass(each, 200, 60, None, seed=9)
        run_pass(each, 260, 60, None, seed=9)
    close(store, store.mean_keys(1, 0, 320, BLOCK), fresh.mean_keys(1, 0, 320, BLOCK))


def test_mean_keys_of_an_aborted_prefill_are_not_used(new_store, monkeypatch):
    store, fresh = new_store(True), new_store(False)
    store.keep_mean_keys(BLOCK)
    for each in (store, fresh):
        run_pass(each, 0, 128, CHUNK)
    with monkeypatch.context() as patch:
        patch.setattr(store, "end", lambda: None)  # never committed
        run_pass(store, 128, 200, CHUNK, seed=3)
    for each in (store, fresh):
        for start in (128, 178):
            run_pass(each, start, 50, None)
    close(store, store.mean_keys(2, 0, 224, BLOCK), fresh.mean_keys(2, 0, 224, BLOCK))


def first_selection(model, method, plainly, monkeypatch):
    """Prefill and select; return the selection, the store, and how many pages were read for it."""
    cache, read = tiered_cache(model, settings(resident=1)), []
    cache.store.tiers.prefills_plainly = plainly
    full = Runner(model, cache, CHUNK, by_layers=True)
    middle = SelectedRunner(full, selected_cache(cache, Speculation(method, chunk=BLOCK, budget=4 * BLOCK)))
    sequence = TokenSequence(id_tensor(500).tolist())
    list(full.prefill(sequence))
    read_page = PlainPageFormat.read
    monkeypatch.setattr(PlainPageFormat, "read", lambda self, page: read.append(page) or read_page(self, page))
    middle.rows(sequence, [5])
    monkeypatch.undo()
    return middle.cache.selection.sort().values, cache.store, len(read)


@pytest.mark.parametrize("method", ["retrieval", "streaming"])
def test_a_first_selection_reads_the_mean_keys_of_the_prefill(tmp_path, monkeypatch, method):
    model = make_model(tmp_path, native=False)
    found, store, pages = first_selection(model, method, True, monkeypatch)
    expected, _, all_pages = first_selection(model, method, False, monkeypatch)
    assert torch.equal(found, expected)
    assert (store.far._mean_keys is not None) == (method == "retrieval")
    if method == "retrieval":
        assert pages <= 2 < 2 * 7 <= all_pages  # of two layers


def test_means_are_kept_only_where_a_prefill_has_the_keys(new_store):
    store = new_store(False)
    store.keep_mean_keys(BLOCK)
    run_pass(store, 0, 128, CHUNK)
    assert store._mean_keys is None


@pytest.mark.parametrize("plainly", [True, False])
def test_a_store_is_freed_at_once(new_store, plainly):
    """Its memory is tens of GiB, which the next store needs."""
    store = new_store(plainly)
    store.keep_mean_keys(BLOCK)
    for each in CONTINUED:
        run_pass(store, *each)
    gone, pages = (ref(x) for x in (store, store.tiers.pages))
    gc.disable()
    try:
        del store
        assert gone() is None and pages() is None
    finally:
        gc.enable()


def test_a_store_allocates_what_is_counted(new_store):
    store = new_store(True, resident=1)
    store.keep_mean_keys(BLOCK)
    tiers, counted = store.tiers, (CAPACITY, PAGE, store.dtype.itemsize)
    assert tiers.pages.nbytes == host_page_bytes(store.shape, 2, *counted)
    staged = tiers.open.nbytes + sum(buffer.nbytes for buffer in tiers.ring.buffers)
    assert staged == staging_bytes(store.shape, 2, 2, *counted[1:])
    assert store.far._mean_keys._means.nbytes == host_mean_key_bytes(store.shape, 2, CAPACITY, BLOCK, *counted[1:])
