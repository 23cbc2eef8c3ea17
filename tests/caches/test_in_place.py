"""Tables of the full cache's chunks after an interrupt, at every instruction of what synchronises them."""

from itertools import count

import pytest
import torch

from offload.caches import block_table, selected
from offload.caches.block_table import TableCache
from offload.caches.full import FullCache
from offload.caches.selection import RecencySelector, Refresh
from tests.support.interrupts import interrupted
from tests.support.stores import new_rope, new_store, projected

MODULES = block_table, selected
PROMPT = [(11 * position) % 249 for position in range(200)]


@pytest.fixture
def caches():
    """A full cache of the prompt, and a function that makes a table over it, in step."""
    full = FullCache(new_store("blocks"), new_rope(torch.float32), 320)
    table = TableCache(full, RecencySelector(4, 32), Refresh(None), 96, 32, 32)
    run(full, PROMPT)
    return full, table


def run(cache, new):
    cache.begin(len(new))
    for layer in range(3):
        cache.attend(layer, *projected(new, layer, torch.float32))
    cache.commit()


def draft_and_verify(full, table, accepted):
    """The table runs four tokens; the full cache runs others in their places, and keeps the first of those."""
    full.truncate(len(PROMPT))
    table.adopt()
    table.truncate(min(table.length, len(PROMPT)))
    run(table, [1, 2, 3, 4])
    run(full, [5, 6, 7, 8])
    full.truncate(len(PROMPT) + accepted)


@pytest.mark.parametrize("accepted", [0, 2])
def test_an_interrupted_adoption_keeps_no_token_that_was_overwritten(caches, accepted):
    full, table = caches
    for at in count():
        draft_and_verify(full, table, accepted)
        with interrupted(at, *MODULES) as hit:
            table.adopt()
        table.adopt()
        assert table.length == full.length == len(PROMPT) + accepted, f"interrupted in line {hit}"
        if not hit:
            break
    assert at > 20


def test_an_interrupted_pass_leaves_no_number_that_a_later_one_has(caches):
    """The full cache then overwrites the tokens behind its own, once."""
    full, table = caches
    for at in count():
        draft_and_verify(full, table, 4)
        table.adopt()
        run(table, [9, 9])
        with interrupted(at, *MODULES) as hit:
            table.begin(1)
        run(full, [5, 6])
        full.truncate(full.length - 1)
        table.adopt()
        assert table.length == full.length, f"interrupted in line {hit}"
        if not hit:
            break
    assert at > 20
