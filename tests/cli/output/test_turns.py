"""Outputs in turn: each whole, in order, as early as that allows."""

from collections import deque
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from triforce_cli.output.turns import Turn


@given(st.lists(st.integers(0, 3), max_size=60))
def test_outputs_are_in_order_and_none_waits_that_need_not(steps):
    """Random writes and ends of four outputs: the longest allowed beginning is written."""
    written, turns = [], deque()
    each = [Turn(turns, partial(written.append, f"open {number}")) for number in range(4)]
    said, ended = [[] for _ in each], [False] * 4
    for step, number in enumerate(steps):
        if ended[number]:
            continue
        if step % 3 == 2:
            ended[number] = True
            each[number].end()
        else:
            said[number].append((number, step))
            each[number](partial(written.append, (number, step)))
        until = next((one for one in range(4) if not ended[one]), 3)
        assert written == [item for one in range(until + 1) for item in (f"open {one}", *said[one])]


def test_a_flush_writes_all_that_waits_and_no_empty_output():
    written, turns = [], deque()
    outputs = [Turn(turns, partial(written.append, name)) for name in "abcd"]
    for number in (2, 1, 0):
        outputs[number](partial(written.append, number))
    assert written == ["a", 0]
    for turn in turns:
        turn.flush()
    assert written == ["a", 0, "b", 1, "c", 2]
