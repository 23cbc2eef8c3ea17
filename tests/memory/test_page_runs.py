"""Consecutive pages come over a link together: fewer copies and waits, and the same bits."""

from math import ceil

import pytest
import torch

from offload.architecture.tier_footprint import COPY_BYTES, copied_pages, copy_bytes_for
from tests.support.models import id_tensor
from tests.support.offloading import PAGE, make_link, make_model, random_delays, settings, tiered_cache

PAGES, CAPACITY = 9, 700
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("runs"), native=False)


def counting(link):
    """Count a link's copies to the device and the waits of the host from now on, as `link.calls`."""
    link.calls = {"copy": 0, "wait": 0, "finish": 0}

    def counted(name, run):
        def call(*args, **kwargs):
            link.calls[name] += 1
            return run(*args, **kwargs)

        return call

    for name in link.calls:
        setattr(link, name, counted(name, getattr(link, name)))
    return link


def filled(model, run, link, **more):
    """Return a cache of whole pages and three tokens, of which `run` pages are copied together."""
    page = 2 * PAGE * 2 * 32 * 4  # bytes
    spread = settings(buffers=4, copy_bytes=run * page, **more)
    cache = tiered_cache(model, spread, link, CAPACITY)
    rows = model.forward(id_tensor(PAGES * PAGE + 3), cache)
    assert cache.store.tiers.run == run
    return cache, rows


@pytest.mark.parametrize("run", [1, 2, 4, 9])
def test_a_pass_takes_one_copy_and_one_wait_for_a_run_of_pages(model, run):
    link = counting(make_link(before=random_delays(run)))
    cache, _ = filled(model, run, link)
    model.forward(id_tensor(1, 1), cache)  # what is prefetched behind it is as much as a pass takes
    before = dict(link.calls)
    model.forward(id_tensor(1, 2), cache)
    found = {name: count - before[name] for name, count in link.calls.items()}
    assert found == {"copy": LAYERS * ceil(PAGES / run), "wait": LAYERS * ceil(PAGES / run), "finish": 0}


@pytest.mark.parametrize(("mode", "share"), [("stream", None), ("hybrid", 0.4), ("hybrid", None)])
def test_runs_of_pages_give_the_rows_of_single_ones(model, mode, share):
    found = []
    for run in (1, 4):
        cache, rows = filled(model, run, make_link(before=random_delays(run)), mode=mode, share=share)
        steps = [model.forward(id_tensor(1, seed), cache) for seed in range(3)]
        cache.truncate(PAGES * PAGE - 5)
        found.append(torch.cat((rows, *steps, model.forward(id_tensor(4, 7), cache))))
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5) if share is None else torch.equal(*found)


def test_the_time_of_a_page_is_its_part_of_a_copy(model):
    """Of a run that is shorter, too: the split between link and host follows from it."""
    link = make_link()
    link.seconds = lambda ticket: ticket.size / 2e7
    cache, _ = filled(model, 4, link)
    model.forward(id_tensor(1, 1), cache)
    assert cache.store.tiers.balance._link == pytest.approx(cache.store.tiers.pages[0, 0].nbytes / 2e7)


def test_the_mean_keys_of_a_restored_prompt_come_without_a_wait_of_the_host(model):
    link = counting(make_link(before=random_delays(3)))
    cache, _ = filled(model, 4, link)
    expected = torch.cat([cache.store.read(0, PAGES * PAGE)[0].unflatten(2, (-1, 16)).mean(3)])
    before = dict(link.calls)
    for layer in range(LAYERS):
        means = cache.store.mean_keys(layer, 0, PAGES * PAGE, 16)
        assert torch.allclose(means, expected[layer], atol=1e-6)
    found = {name: count - before[name] for name, count in link.calls.items()}
    assert found == {"copy": LAYERS * 3, "wait": LAYERS * 3, "finish": 0}  # before: a copy and a wait for each page


def test_so_many_pages_are_copied_together_as_a_fast_link_needs():
    assert copied_pages(4 * 2**20, 100) == 4
    assert copied_pages(5 * 2**20, 100) == 4  # at least COPY_BYTES
    assert copied_pages(2**20, 3) == 3  # of three
    assert copied_pages(2**30, 100) == 1
    assert copy_bytes_for(25e9) == COPY_BYTES
    assert copy_bytes_for(50e9) == pytest.approx(30e6)
