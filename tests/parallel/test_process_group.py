"""What the ranks of a group do together: sums, words, differences, and the end of one of them."""

import os
import signal
import time

import pytest
import torch

from offload import GenerationConfig, Speculation
from offload.errors import RankLost, SettingsError
from offload.loading.same_model import check_same
from tests.support.engine import GREEDY, SMALL
from tests.support.models import ids
from tests.support.rank_pool import Crew, rank_engine


def sums(group):
    """Of numbers whose sum depends on the order, of every size that a pass may have."""
    found = []
    for size in (1, 7, 64, 4096, 100_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(size, generator=torch.Generator().manual_seed(group.rank)).to(dtype) * 10**group.rank
            found.append(group.sum(x))
    return found


def test_all_ranks_get_the_same_bits_of_a_sum(crew):
    first, *others = crew.run(sums)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
    alone = [torch.randn(4096, generator=torch.Generator().manual_seed(rank)) * 10**rank for rank in range(3)]
    torch.testing.assert_close(first[6], sum(alone[: len(others) + 1]))


def words(group):
    rows = torch.full((2, group.rank + 1), float(group.rank))
    widths = [rank + 1 for rank in range(group.size)]
    return group.agree([group.rank + 0.1, 2**53 - group.rank]), group.broadcast(group.rank), group.gather(rows, widths)


def test_rank_0_decides_and_parts_are_put_together(crew):
    for numbers, told, rows in crew.run(words):
        assert numbers == [0.1, 2**53]
        assert told == 0
        assert torch.equal(rows, torch.tensor([[0.0, 1, 1, 2, 2, 2][: rows.shape[1]]] * 2))


def differing(group):
    check_same(group, {"model": "a", "budget": 3})
    try:
        check_same(group, {"model": "a", "budget": 3 + group.rank // (group.size - 1)})
    except SettingsError as error:
        return error.message


def test_who_differs_is_told_on_every_rank(crew):
    messages = crew.run(differing)
    assert len(set(messages)) == 1
    assert f"rank {len(messages) - 1}" in messages[0]
    assert "budget: 3 and 4" in messages[0]


@pytest.mark.parametrize("phase", ["prefill", "draft", "verification"])
def test_the_end_of_a_rank_ends_the_others_at_once(folders, phase):
    crew = Crew(2)
    took, _ = crew.run(until_lost, folders["llama"], folders["draft"], phase)
    crew.close()
    assert took < 10


def until_lost(group, folder, draft, phase):
    """Rank 1 is killed in a phase of its work; rank 0 gives the seconds between its last event and the error."""
    one = rank_engine(group, folder, draft)
    wanted, last = Speculation("triforce", "a model", gamma1=2, gamma2=4, **SMALL), time.perf_counter()
    events = one.generate(ids(100), GREEDY, GenerationConfig(max_new_tokens=200), wanted)
    if group.rank == 1:
        die_in(phase, one)
    try:
        for _ in events:
            last = time.perf_counter()
    except RankLost:
        return time.perf_counter() - last
    raise AssertionError("nothing was lost")


def die_in(phase, one):
    """From now on this process is killed as it does something for the fifth time."""
    model = one.draft if phase == "draft" else one.model
    forward, calls = model.forward, []

    def deadly(ids, cache):
        calls.append(len(ids))
        if len(calls) == 5 + 10 * (phase == "verification"):  # a prompt of 100 tokens is read in seven passes
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(ids, cache)

    model.forward = deadly
