"""Passes over more tokens than a page has, layer by layer, against the same passes of a store in one memory."""

import pytest
import torch

from offload.architecture.pages import host_mean_key_bytes, host_page_bytes, staging_bytes
from offload.architecture.rope import Rope
from offload.kernels.native.ops import NativeOperations
from offload.kernels.native.structs import BLOCK
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.memory import factory
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import TransferFailed
from offload.memory.tiers import Tiers
from tests.support.models import make_hf_model
from tests.support.offloading import (
    CAPACITY,
    CPU,
    PAGE,
    SHAPE,
    make_link,
    native_kernel,
    random_delays,
    settings,
)

CHUNK = 50
PASSES = [(0, 400, CHUNK), (400, 3, None)]  # start, tokens, chunk
CONTINUED = [(0, 90, None), (90, 401, CHUNK), (491, 2, None)]  # behind a whole page and a begun one


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    make_hf_model("llama", **SHAPE).save_pretrained(folder)
    return FolderCheckpoint(folder).shape


@pytest.fixture(params=["torch-fp32", "torch-bf16", "native-bf16"])
def new_store(request, shape):
    """Return a function that makes a store over tiers, or without a mode in one memory."""
    kind, name = request.param.split("-")
    if kind == "native" and native_kernel() is None:
        pytest.skip("there is no native kernel here")
    operations = TorchOperations() if kind == "torch" else NativeOperations(native_kernel())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]

    def new(mode=None, resident=0, link=None):
        if mode is None:
            return factory.new_store(operations.kernel, shape, CAPACITY, dtype, CPU)
        link = link or make_link(before=random_delays(1))
        stores = TieredStoreFactory(operations, CPU, settings(mode, resident), link)
        return stores.new_store(shape, CAPACITY, dtype)

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


@pytest.mark.daily("torch-fp32-*-fresh", "torch-bf16-*-continued", "native-bf16-stream-0-*")
@pytest.mark.parametrize("passes", [PASSES, CONTINUED], ids=["fresh", "continued"])
@pytest.mark.parametrize(("mode", "resident"), [("stream", 0), ("hybrid", 1), ("host", 0)])
def test_a_prefill_over_tiers_attends_and_stores_as_in_one_memory(new_store, passes, mode, resident):
    paged, single = new_store(mode, resident), new_store()
    for each in passes:
        found, expected = (run_pass(store, *each) for store in (paged, single))
        close(paged, found, expected)
    end = sum(passes[-1][:2])
    for found, expected in zip(paged.read(0, end), single.read(0, end), strict=True):
        assert torch.equal(found, expected)


def test_an_aborted_prefill_leaves_committed_tokens_intact(new_store):
    cable = []

    def fail(pairs):
        if cable:
            raise OSError("the cable is loose")

    store, expected = new_store("stream", link=make_link(before=fail)), new_store("stream")
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
    monkeypatch.setattr(Tiers, "to_device", lambda tiers, x: sizes.append(x.nbytes) or fetch(tiers, x))
    return sizes


@pytest.mark.parametrize("chunk", [BLOCK, PAGE])
def test_mean_keys_are_made_by_the_prefill(new_store, fetched, chunk):
    store, single = new_store("stream", resident=1), new_store()
    store.keep_mean_keys(chunk)
    for each in (store, single):
        for part in CONTINUED:
            run_pass(each, *part)
    whole = 491 // chunk * chunk
    for layer in range(3):
        expected = single.mean_keys(layer, 0, whole, chunk)
        fetched.clear()
        found = [store.mean_keys(layer, *borders, chunk) for borders in ((0, 128), (128, whole))]
        close(store, torch.cat(found, dim=1), expected)
        if layer:
            assert sum(fetched) == expected.numel() * store.dtype.itemsize


def test_mean_keys_of_tokens_that_changed_are_computed_again(new_store):
    store, fresh = new_store("stream"), new_store()
    store.keep_mean_keys(BLOCK)
    run_pass(store, 0, 400, CHUNK)
    run_pass(fresh, 0, 400, CHUNK)
    for each in (store, fresh):
        each.truncate(200)
        run_pass(each, 200, 60, None, seed=9)
        run_pass(each, 260, 60, None, seed=9)
    close(store, store.mean_keys(1, 0, 320, BLOCK), fresh.mean_keys(1, 0, 320, BLOCK))


def test_a_store_allocates_what_is_counted(new_store):
    store = new_store("stream", resident=1)
    store.keep_mean_keys(BLOCK)
    tiers, counted = store.tiers, (CAPACITY, PAGE, store.dtype.itemsize)
    assert tiers.pages.nbytes == host_page_bytes(store.shape, 2, *counted)
    staged = tiers.open.nbytes + sum(buffer.nbytes for buffer in tiers.ring.buffers)
    assert staged == staging_bytes(store.shape, 2, 2, *counted[1:])
    assert store._mean_keys._means.nbytes == host_mean_key_bytes(store.shape, 2, CAPACITY, BLOCK, *counted[1:])
