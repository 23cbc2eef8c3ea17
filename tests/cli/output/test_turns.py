"""Outputs in turn: each whole, in order, as early as that allows."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from triforce_cli.output.turns import Turns


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 40))
def test_outputs_are_in_order_and_none_waits_that_need_not(steps, until):
    """Random writes and ends of up to four outputs, nested in two: what is written is the longest allowed beginning."""
    written, turns = [], Turns()
    outer = [turns.add(partial(written.append, f"open {number}")) for number in range(2)]
    inner = [Turns(turn) for turn in outer]
    each = [inner[number // 2].add() for number in range(4)]
    said, ended = [[] for _ in each], [False] * 4
    for step, number in enumerate(steps[:until]):
        if ended[number]:
            continue
        if step % 3 == 2:
            ended[number] = True
            each[number].end()
            if all(ended[number // 2 * 2 : number // 2 * 2 + 2]):
                outer[number // 2].end()
        else:
            said[number].append((number, step))
            each[number](partial(written.append, (number, step)))
        expected = []
        for one in range(4):
            expected += [f"open {one // 2}"] if one % 2 == 0 else []
            expected += said[one]
            if not ended[one]:
                break
        assert written == expected


def test_a_flush_writes_all_that_waits_and_no_empty_output():
    written, turns = [], Turns()
    first, second, third, fourth = (turns.add(partial(written.append, name)) for name in "abcd")
    third(partial(written.append, 3))
    second(partial(written.append, 2))
    first(partial(written.append, 1))
    assert written == ["a", 1]
    turns.flush()
    assert written == ["a", 1, "b", 2, "c", 3]
    assert not fourth.waiting
