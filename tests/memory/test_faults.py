"""Links that fail, are slow or are interrupted: an error or the right output, never a wrong one, and no hang."""

import pytest
import torch

from offload.memory.link import TransferFailed
from tests.support.models import id_tensor
from tests.support.offloading import PAGE, make_link, make_model, settings, tiered_cache

LENGTH = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("faults"), native=False)


def expected(model):
    cache = tiered_cache(model, settings("stream"))
    model.forward(id_tensor(LENGTH), cache)
    return model.forward(id_tensor(3, 1), cache)


class Fault:
    """A callback before every copy, which runs `action` for `times` copies from number `first` on."""

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
    """Run some passes: copies that were in flight before the fault began may still succeed."""
    for _ in range(3):
        model.forward(id_tensor(3, 1), cache)
        cache.truncate(LENGTH)


def fail():
    raise OSError("the cable is loose")


def test_a_copy_that_fails_once_is_retried(model):
    fault = Fault(fail)
    cache = tiered_cache(model, settings(), make_link(before=fault))
    model.forward(id_tensor(LENGTH), cache)
    fault.begin()
    decode(model, cache)
    assert fault.seen > fault.first
    torch.testing.assert_close(model.forward(id_tensor(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["stream", "hybrid"])
def test_copies_that_keep_failing_raise_and_the_next_pass_is_right(model, mode):
    fault = Fault(fail, times=6)
    cache = tiered_cache(model, settings(mode, share=None if mode == "stream" else 0.5), make_link(before=fault))
    model.forward(id_tensor(LENGTH), cache)
    fault.begin()
    with pytest.raises(TransferFailed, match="the cable is loose"):
        decode(model, cache)
    assert cache.length == LENGTH
    torch.testing.assert_close(model.forward(id_tensor(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


def test_a_failed_copy_to_the_host_raises_and_the_prefill_can_be_repeated(model):
    fault = Fault(fail)
    cache = tiered_cache(model, settings(), make_link(before=fault))
    model.forward(id_tensor(90, 2), cache)
    cache.truncate(0)
    fault.begin()
    with pytest.raises(TransferFailed):
        model.forward(id_tensor(LENGTH), cache)
    assert cache.length == 0
    model.forward(id_tensor(LENGTH), cache)
    torch.testing.assert_close(model.forward(id_tensor(3, 1), cache), expected(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("native", [False, True])
def test_a_failed_prefill_behind_an_open_page_leaves_that_page_intact(native, tmp_path):
    """Its committed tokens are on the device; its host copy may be half overwritten."""
    model = make_model(tmp_path, native=native)
    fault = Fault(fail, times=10**9)
    cache = tiered_cache(model, settings(), make_link(before=fault))
    model.forward(id_tensor(LENGTH), cache)
    cache.truncate(PAGE // 2)
    fault.begin(after=2)  # the first copies the open page back to the device
    with pytest.raises(TransferFailed):
        model.forward(id_tensor(LENGTH, 5), cache)
    fault.first = None
    fresh = tiered_cache(model, settings())
    model.forward(id_tensor(LENGTH)[: PAGE // 2], fresh)
    for part in (id_tensor(LENGTH, 6), id_tensor(3, 7)):
        found, wanted = (model.forward(part, each) for each in (cache, fresh))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
