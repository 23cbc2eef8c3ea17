"""The kernel's thread pool: the same bits on any thread, for several callers, and after a fork."""

import os
import threading

import pytest
import torch

from offload.kernels.native import find_kernel, generate_on_one_thread, torch_on_one_thread
from offload.kernels.native.layout import pack_weight
from tests.support.native_kernel import DTYPES, attention, draw, fill_blocks, linear


class Work:
    """Calls of each kind, for decoding and for prefill, and their results by one thread."""

    def __init__(self, kernel, dtype, rows=200, tokens=100, seen=1200):
        self._kernel, self._dtype, self._seen = kernel, dtype, seen
        self._weight, self._norm = pack_weight(draw(500, 96, dtype=dtype, seed=1)), draw(96, dtype=dtype, seed=2)
        self._x = {rows: draw(rows, 96, dtype=dtype, seed=rows) for rows in (1, rows)}
        self._blocks = fill_blocks(*(draw(2, seen + tokens, 64, dtype=dtype, seed=seed) for seed in (3, 4)))
        self._q = {tokens: draw(tokens, 6, 64, dtype=dtype, seed=tokens) for tokens in (1, tokens)}

    def run(self):
        """Return the results of all calls."""
        found = []
        for rows, x in self._x.items():
            found.append(linear(self._kernel, x, self._weight, None, None, torch.empty(rows, 500, dtype=self._dtype)))
            found.append(self._kernel.norm(x, self._norm, 1e-5, torch.empty_like(x)))
            found.append(self._kernel.gate(x, torch.empty(rows, 48, dtype=self._dtype)))
        for q in self._q.values():
            found += attention(self._kernel, q, self._blocks, self._seen)
        return found


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_concurrent_callers_get_their_own_results(set_threads):
    """More callers than the pool has jobs: the others run their loops alone."""
    set_threads(3)
    works = [Work(find_kernel(), dtype, rows=40, tokens=20, seen=600) for dtype in DTYPES * 3]
    expected = [work.run() for work in works]
    wrong, start = [], threading.Barrier(len(works))

    def call(number):
        start.wait()
        wrong.extend(number for _ in range(20) if not same(works[number].run(), expected[number]))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(works))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_starts_threads_of_its_own(kernel, set_threads):
    """It has no threads at first; those of torch's OpenMP are gone."""
    set_threads(3)
    work = Work(kernel, torch.float32)
    expected = work.run()  # the parent's threads exist
    child = os.fork()
    if child == 0:
        with torch_on_one_thread(kernel):
            os._exit(0 if same(work.run(), expected) and same(work.run(), expected) else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(work.run(), expected), "the parent's pool still works"


def test_torch_is_limited_to_one_thread_only_within_the_block(set_threads):
    kernel = find_kernel()
    set_threads(3)
    with torch_on_one_thread(kernel):
        assert torch.get_num_threads() == 1
        with torch_on_one_thread(kernel):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), torch_on_one_thread(kernel):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
    with torch_on_one_thread(None):
        assert torch.get_num_threads() == 3


def test_a_generator_is_limited_and_its_consumer_is_not(set_threads):
    set_threads(3)
    seen, closed = [], []

    def events():
        try:
            for number in range(3):
                seen.append((torch.get_num_threads(), (yield number)))
        finally:
            closed.append(True)
        return "result"

    def consume():
        result = yield from generate_on_one_thread(find_kernel(), events())
        yield result

    consumer = consume()
    found = [next(consumer)]
    for answer in ("a", "b", "c"):
        assert torch.get_num_threads() == 3
        found.append(consumer.send(answer))
    assert found == [0, 1, 2, "result"] and closed == [True]
    assert seen == [(1, "a"), (1, "b"), (1, "c")]

    abandoned = generate_on_one_thread(find_kernel(), events())
    next(abandoned)
    abandoned.close()
    assert closed == [True, True] and torch.get_num_threads() == 3
