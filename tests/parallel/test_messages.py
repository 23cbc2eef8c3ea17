"""Values between ranks: JSON, and never pickles."""

import re
from pathlib import Path

import pytest

import offload
import triforce_cli

VALUES = [None, "", "a\ud800é😀\0", [], {"a": [1, -2.5, 2**70, float("inf")], "b": {"c": True}}, ["x" * 100_000]]
UNPICKLING = re.compile(  # torch's collectives of objects, and its launcher, whose store of pickles any host can reach
    r"\b(broadcast|scatter|send|recv)_object_list\b|\b(all_)?gather_object\b"
    r"|torch\.distributed[. ](import )?(elastic|run|launch|launcher|rpc)\b"
)


def exchanged(group):
    own = VALUES[group.rank :] + VALUES[: group.rank]
    return [group.broadcast(value) for value in own], group.collect(own[0]), group.collect(own)


def test_values_arrive_as_they_were_sent(rank_pool):
    for values, each, all_ in rank_pool.run(exchanged):
        assert values == VALUES
        assert each == VALUES[: len(each)]
        assert all_ == [VALUES[rank:] + VALUES[:rank] for rank in range(len(all_))]


@pytest.mark.parametrize("package", [offload, triforce_cli])
def test_nothing_between_processes_is_pickled(package):
    sources = list(Path(package.__file__).parent.rglob("*.py"))
    assert [source for source in sources if UNPICKLING.search(source.read_text("utf-8"))] == []
