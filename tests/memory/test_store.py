"""The full cache over tiers of memory: placement and slow copies do not change the output."""

import random

import pytest
import torch

from offload import Speculation
from offload.architecture.pages import GATHERED_BYTES
from offload.caches.factory import selected_cache
from offload.kernels.native.structs import PIECE
from offload.memory import tiered_store
from offload.memory.host_attention import HOST_ROWS, Balance
from offload.memory.tiers import Tiers
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import id_tensor
from tests.support.offloading import (
    CAPACITY,
    PAGE,
    make_link,
    make_model,
    native_kernel,
    random_delays,
    settings,
    tiered_cache,
)

MODES = [("stream", 0), ("host", 0), ("hybrid", 0), ("hybrid", 1), ("stream", 2), ("stream", 3)]


@pytest.fixture(scope="module", params=["torch", "native-fp32", "native-bf16"])
def model(request, tmp_path_factory):
    if request.param != "torch" and native_kernel() is None:
        pytest.skip("there is no native kernel here")
    dtype = torch.bfloat16 if request.param.endswith("bf16") else torch.float32
    return make_model(tmp_path_factory.mktemp("tiers"), dtype, request.param != "torch")


def same(model, found, expected):
    """Compare up to rounding, which differs with torch's operations and with a single store."""
    if model.dtype == torch.bfloat16:
        return (found - expected).abs().max() <= 0.02 * expected.abs().max()
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.daily("torch-[0-2]", "native-fp32-[3-5]", "native-bf16-*")
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_end_with_the_same_bits(model, seed):
    """Histories of passes, rollbacks and aborted passes; on the native kernel every bit is equal."""
    rng = random.Random(seed)
    mode, resident = rng.choice(MODES)
    page, room, sizes = PAGE, CAPACITY, (1, 4, 30, 100)
    if model.operations.kernel is not None:
        page, room, sizes = PIECE, 1700, (1, 30, 300, 600)
    cache = tiered_cache(model, settings(mode, resident, page_tokens=page), make_link(before=random_delays(seed)), room)
    tokens = []
    for _ in range(25):
        if rng.random() < 0.3 and tokens:
            del tokens[rng.randrange(len(tokens) // 2, len(tokens)) :]
            cache.truncate(len(tokens))
        if rng.random() < 0.2:
            abort_a_pass(model, cache, rng)
        count = min(rng.choice(sizes), room - 100 - len(tokens))
        if count > 0:
            new = [rng.randrange(267) for _ in range(count)]
            model.forward(torch.tensor(new), cache)
            tokens += new
    found = model.forward(id_tensor(5), cache)
    fresh = tiered_cache(model, settings("stream", resident, page_tokens=page), capacity=room)
    for part in torch.tensor(tokens).split(page - 24):
        model.forward(part, fresh)
    expected = model.forward(id_tensor(5), fresh)
    assert same(model, found, expected)
    if model.operations.kernel is not None:
        assert torch.equal(found, expected)


def abort_a_pass(model, cache, rng):
    """Run a pass that raises in one of its layers."""
    at, attend = rng.randrange(3), cache.attend

    def failing(layer, *rest):
        if layer == at:
            raise InterruptedError
        return attend(layer, *rest)

    cache.attend = failing
    with pytest.raises(InterruptedError):
        model.forward(id_tensor(rng.choice((1, 50, 90))), cache)
    del cache.attend


def test_chunks_are_gathered_in_parts_of_bounded_memory(model, monkeypatch):
    cache = tiered_cache(model, settings("stream", 1))
    model.forward(id_tensor(300), cache)
    rows, chunks = torch.tensor([2, 3, 4, 5, 5, 0]), torch.tensor([3, 4, 7, 17, 1, 2])
    whole = cache.store.gather(rows, chunks, 16)
    sizes = []
    fetched = Tiers.to_device
    monkeypatch.setattr(Tiers, "to_device", lambda tiers, x: sizes.append(x.nbytes) or fetched(tiers, x))
    monkeypatch.setattr(tiered_store, "GATHERED_BYTES", 2 * 2 * 16 * model.shape.head_dim * model.dtype.itemsize)
    for found, expected in zip(cache.store.gather(rows, chunks, 16), whole, strict=True):
        assert torch.equal(found, expected)
    assert len(sizes) == 3
    assert cache.store.tiers.pages._staging.nbytes == GATHERED_BYTES
    assert max(sizes) <= tiered_store.GATHERED_BYTES


def test_the_host_of_a_gpu_shares_no_passes_of_many_rows():
    balance = Balance(share=None, most_rows=HOST_ROWS)
    balance.observe_link(1.0)
    for rows in (1, HOST_ROWS, 2048):
        balance.observe_host(rows, 1.0, None)
    assert balance.streamed(10, 1) == balance.streamed(10, HOST_ROWS) == 5
    assert balance.streamed(10, 2048) == 10
    assert Balance(share=1.0, most_rows=HOST_ROWS).streamed(10, 2048) == 10


@pytest.mark.parametrize(("link", "host", "streamed"), [(1e6, 1e-6, 1), (1e-6, 1e6, 9)])
def test_the_slower_side_keeps_a_page_by_which_it_is_measured(link, host, streamed):
    balance = Balance(share=None)
    balance.observe_link(link)
    balance.observe_host(1, host, None)
    assert balance.streamed(10, 1) == streamed
    assert balance.streamed(2, 1) == 1
    assert balance.streamed(1, 1) == round(streamed / 10)  # which there is not for both


@pytest.mark.parametrize("chunk", [16, 48, 100])
def test_selected_chunks_never_cross_the_border_of_a_page(model, chunk):
    """A chunk size that does not divide a page is rounded to one that does."""
    settings_of = Speculation("retrieval", chunk=chunk, budget=4 * chunk)
    full = Runner(model, tiered_cache(model, settings("stream")), 50)
    sequence = TokenSequence(id_tensor(500).tolist())
    list(full.prefill(sequence))
    middle = SelectedRunner(full, selected_cache(full.cache, settings_of))
    rows = middle.rows(sequence, [5, 6])
    assert torch.isfinite(rows).all()
