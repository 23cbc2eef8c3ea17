"""Links that fail, dawdle or are interrupted: an error or the right output, never a wrong one, and no hang."""

import os
import signal
import time

import pytest
import torch

from offload.offloading import SimulatedLink, TransferFailed
from tests.support.offloading import CAPACITY, PIECE, make_link, make_model, settings, tiered_cache

LENGTH = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("faults"), native=False)


def ids(count, seed=0):
    return torch.randint(0, 267, (count,), generator=torch.Generator().manual_seed(seed))


def expected(model):
    cache = tiered_cache(model, settings("stream"))
    model.forward(ids(LENGTH), cache)
    return model.forward(ids(3, 1), cache)


class Trouble:
    """Called before every copy; from number `first` on, for `times` of them, does something."""

    def __init__(self, action, times=1):
        self.action, self.times = action, times
        self.first, self.seen = None, 0

    def __call__(self, pairs):
        self.seen += 1
        if self.first is not None and self.first <= self.seen < self.first + self.times:
            self.action()

    def begin(self, after=2):
        self.first = self.seen + after


def decode(model, cache):
    """Some steps: what was on its way before the trouble began may still arrive."""
    for _ in range(3):
        model.forward(ids(3, 1), cache)
        cache.truncate(LENGTH)


def fail():
    raise OSError("the cable is loose")


def test_a_copy_that_fails_once_is_tried_again(model):
    trouble = Trouble(fail)
    cache = tiered_cache(model, settings(), make_link(before=trouble))
    model.forward(ids(LENGTH), cache)
    trouble.begin()
    decode(model, cache)
    assert trouble.seen > trouble.first
    torch.testing.assert_close(model.forward(ids(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["stream", "hybrid"])
def test_copies_that_go_on_failing_are_an_error_and_the_next_pass_is_right(model, mode):
    trouble = Trouble(fail, times=6)
    cache = tiered_cache(model, settings(mode, share=0.5), make_link(before=trouble))
    model.forward(ids(LENGTH), cache)
    trouble.begin()
    with pytest.raises(TransferFailed, match="the cable is loose"):
        decode(model, cache)
    assert cache.length == LENGTH
    torch.testing.assert_close(model.forward(ids(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


def test_a_link_that_fails_for_good_is_an_error_each_time(model):
    trouble = Trouble(fail, times=10**9)
    cache = tiered_cache(model, settings(), make_link(before=trouble))
    model.forward(ids(LENGTH), cache)
    trouble.begin(after=1)
    cache.store.tiers.ring.drop()
    for _ in range(3):
        with pytest.raises(TransferFailed):
            model.forward(ids(3, 1), cache)


def test_a_prompt_whose_way_to_the_host_fails_is_an_error_and_can_be_read_again(model):
    trouble = Trouble(fail)
    cache = tiered_cache(model, settings(), make_link(before=trouble))
    model.forward(ids(90, 2), cache)
    cache.truncate(0)
    trouble.begin()
    with pytest.raises(TransferFailed):
        model.forward(ids(LENGTH), cache)
    assert cache.length == 0
    model.forward(ids(LENGTH), cache)
    torch.testing.assert_close(model.forward(ids(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


def test_a_link_that_becomes_ten_times_as_slow_changes_nothing(model):
    link = make_link(bandwidth=2e9)
    cache = tiered_cache(model, settings("hybrid"), link)
    model.forward(ids(LENGTH), cache)
    link.bandwidth /= 10
    torch.testing.assert_close(model.forward(ids(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


@pytest.fixture
def interruptible():
    """Ctrl-C is a KeyboardInterrupt, whatever this process has been told before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_copy_is_waited_for(model):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    trouble = Trouble(interrupt)
    cache = tiered_cache(model, settings("hybrid", share=0.5), make_link(before=trouble))
    model.forward(ids(LENGTH), cache)

    def decode_until_heard():
        for _ in range(3):  # Python drops an interrupt that comes while it runs a weak reference's callback
            trouble.begin()
            decode(model, cache)

    with pytest.raises(KeyboardInterrupt):
        decode_until_heard()
    torch.testing.assert_close(model.forward(ids(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


def test_a_missing_wait_is_found(model, monkeypatch):
    """What the poison is for: without waiting, the output is no number."""
    monkeypatch.setattr(SimulatedLink, "wait", lambda link, ticket: None)
    cache = tiered_cache(model, settings(), make_link(before=lambda pairs: time.sleep(0.01)))
    model.forward(ids(60), cache)
    list(model.forward_by_layers(ids(140, 1), cache, 50))
    assert model.forward(ids(3, 1), cache).isnan().any()


def test_a_buffer_is_not_filled_while_it_is_used(model, monkeypatch):
    """The other half: a buffer given back too early is found as well."""
    from offload.offloading.prefetch import PrefetchRing

    take = PrefetchRing.take
    monkeypatch.setattr(
        PrefetchRing, "take", lambda ring, piece: (buffer := take(ring, piece), ring.release(buffer))[0]
    )
    monkeypatch.setattr("offload.offloading.store.TieredStore._streamed", streamed_late)
    cache = tiered_cache(model, settings(), make_link(before=lambda pairs: time.sleep(0.002)))
    model.forward(ids(LENGTH), cache)
    assert model.forward(ids(3, 1), cache).isnan().any()


def streamed_late(store, layer, piece, q):
    buffer = store.tiers.ring.take(store._item(layer, piece))
    return store.tiers.format.attend(buffer, q, store.span)


def test_no_copy_is_larger_than_what_is_stored(model):
    """Only what the sequence has moves, never the capacity."""
    link = make_link()
    cache = tiered_cache(model, settings(), link, capacity=50 * CAPACITY)
    model.forward(ids(LENGTH), cache)
    before = link.statistics.bytes
    model.forward(ids(1), cache)
    cache.store.tiers.ring.drop()
    assert link.statistics.bytes - before <= 1.5 * model.shape.kv_bytes(LENGTH, 4)


@pytest.mark.parametrize("native", [False, True])
def test_a_prompt_that_fails_behind_a_begun_piece_leaves_that_piece(native, tmp_path):
    """Its committed tokens are on the device; what is in host memory may have been half overwritten."""
    model = make_model(tmp_path, native=native)
    trouble = Trouble(fail, times=10**9)
    cache = tiered_cache(model, settings(), make_link(before=trouble))
    model.forward(ids(LENGTH), cache)
    cache.truncate(PIECE // 2)
    trouble.begin(after=2)  # the first brings the begun piece back to the device
    with pytest.raises(TransferFailed):
        model.forward(ids(LENGTH, 5), cache)
    trouble.first = None
    fresh = tiered_cache(model, settings())
    model.forward(ids(LENGTH)[: PIECE // 2], fresh)
    for part in (ids(LENGTH, 6), ids(3, 7)):
        found, wanted = (model.forward(part, each) for each in (cache, fresh))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
