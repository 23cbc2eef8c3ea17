"""The collectives of a group of ranks, the check that they run the same model, and the loss of a rank."""

import os
import queue
import signal
import threading

import pytest
import torch

from offload import GenerationConfig, Speculation
from offload.errors import RankLost, SettingsError
from offload.loading.weights_digest import check_same
from offload.parallel import process_group
from tests.support.engine import GREEDY, SMALL
from tests.support.models import ids
from tests.support.rank_pool import RankPool, rank_engine


def sums(group):
    """Sum numbers whose sum depends on the order, in every size that a pass may have."""
    found = []
    for size in (1, 7, 64, 4096, 100_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(size, generator=torch.Generator().manual_seed(group.rank)).to(dtype) * 10**group.rank
            found.append(group.sum(x))
    return found


def test_all_ranks_get_the_same_bits_of_a_sum(rank_pool):
    first, *others = rank_pool.run(sums)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
    alone = [torch.randn(4096, generator=torch.Generator().manual_seed(rank)) * 10**rank for rank in range(3)]
    torch.testing.assert_close(first[6], sum(alone[: len(others) + 1]))


def decisions(group):
    rows = torch.full((2, group.rank + 1), float(group.rank))
    widths = [rank + 1 for rank in range(group.size)]
    return group.agree([group.rank + 0.1, 2**53 - group.rank]), group.broadcast(group.rank), group.gather(rows, widths)


def test_rank_0_decides_and_parts_are_gathered(rank_pool):
    for numbers, broadcast, rows in rank_pool.run(decisions):
        assert numbers == [0.1, 2**53]
        assert broadcast == 0
        assert torch.equal(rows, torch.tensor([[0.0, 1, 1, 2, 2, 2][: rows.shape[1]]] * 2))


def differing(group):
    check_same(group, {"model": "a", "budget": 3})
    try:
        check_same(group, {"model": "a", "budget": 3 + group.rank // (group.size - 1)})
    except SettingsError as error:
        return error.message


def test_every_rank_names_the_rank_that_differs(rank_pool):
    messages = rank_pool.run(differing)
    assert len(set(messages)) == 1
    assert f"rank {len(messages) - 1}" in messages[0]
    assert "budget: 3 and 4" in messages[0]


class Wire:
    """In place of torch.distributed: two ranks, one of which is this one; the other's end of the line is `peer`."""

    def __init__(self):
        self.peer, self.sent = queue.SimpleQueue(), []

    def __getattr__(self, name):
        return lambda *args, **kwargs: {"get_world_size": 2, "get_rank": 0}.get(name)

    def recv(self, target, peer, group):
        if self.peer.get() == "broken":
            raise RuntimeError("Connection closed by peer")

    def send(self, x, peer, group):
        self.sent.append(peer)
        self.peer.put("broken")  # it has nothing to wait for any more, and ends first


def watched(monkeypatch):
    """Return a group of two ranks, its line to the other one, and the ranks that it reports as lost."""
    wire, lost = Wire(), queue.SimpleQueue()
    monkeypatch.setattr(process_group, "dist", wire)
    return process_group.Ranks(torch.device("cpu"), lost=lost.put), wire, lost


def end_of_watching():
    for thread in threading.enumerate():
        if thread.name == "watch":
            thread.join(60)


def test_a_rank_that_ends_without_a_goodbye_is_lost(monkeypatch):
    _, wire, lost = watched(monkeypatch)
    wire.peer.put("broken")
    assert lost.get(timeout=60) == 1


def test_neither_a_rank_that_says_goodbye_is_lost_nor_one_that_ends_after_ours(monkeypatch):
    _, wire, lost = watched(monkeypatch)
    wire.peer.put("goodbye")
    end_of_watching()
    assert lost.empty()
    group, wire, lost = watched(monkeypatch)
    group.leave()
    end_of_watching()
    assert wire.sent == [1] and lost.empty()


@pytest.mark.long
def test_the_loss_of_a_rank_ends_the_others(folders):
    rank_pool = RankPool(2)
    lost, _ = rank_pool.run(is_lost, folders["llama"], folders["draft"])
    rank_pool.close()
    assert lost


def is_lost(group, folder, draft):
    """Kill rank 1 after a few of its tokens; return whether rank 0 notices."""
    one = rank_engine(group, folder, draft)
    wanted = Speculation("triforce", "a model", gamma1=2, gamma2=4, **SMALL)
    try:
        for number, _ in enumerate(one.generate(ids(100), GREEDY, GenerationConfig(max_new_tokens=200), wanted)):
            if group.rank == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankLost:
        return True
    return False


def test_an_error_of_this_ranks_own_gpu_keeps_its_text():
    with pytest.raises(RuntimeError, match="an illegal memory access") as raised, process_group._rank_lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    assert not isinstance(raised.value, RankLost)
    with pytest.raises(RankLost), process_group._rank_lost():
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")
