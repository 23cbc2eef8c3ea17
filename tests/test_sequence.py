"""Token sequences: tentative tokens, and watermarks of changes."""

import pytest

from offload.sequence import TokenSequence, Watermarks, common_prefix


def test_watermarks_return_the_unchanged_length_for_each_follower():
    class Follower:
        pass

    marks, first, second = Watermarks(), Follower(), Follower()
    assert marks.update(first, 10) == 0
    marks.lower(4)
    assert marks.update(second, 6) == 0
    marks.lower(5)
    assert (marks.update(first, 8), marks.update(second, 8)) == (4, 5)
    assert marks.update(first, 8) == 8


def test_tokens_are_tentative_until_they_are_committed():
    sequence = TokenSequence([1, 2])
    sequence.extend([3])
    assert sequence.tentative == [3]
    sequence.commit()
    assert sequence.tentative == []
    sequence.restart([1, 9])
    assert (sequence.tokens, sequence.committed) == ([1, 9], 2)


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3], known=1) == 2


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 1025, 2047, 2048, 3000])
def test_the_common_prefix_of_long_lists(at):
    """They are compared in runs, which may end before a list does."""
    first, other = list(range(3000)), list(range(3000))
    if at < 3000:
        other[at] = -1
    for known in {0, at // 2, at}:
        assert common_prefix(first, other, known) == common_prefix(other, first, known) == at
        assert common_prefix(first, other[:at], known) == common_prefix(other[:at], first, known) == at
    assert common_prefix(first, tuple(other)) == at
