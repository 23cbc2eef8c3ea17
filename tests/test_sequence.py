"""The sequence: what is tentative, and what its followers learn of changes."""

from offload.sequence import TokenSequence, Watermarks, common_prefix


def test_watermarks_tell_each_follower_what_is_unchanged():
    class Follower:
        pass

    marks, first, second = Watermarks(), Follower(), Follower()
    assert marks.look(first, 10) == 0
    marks.lower(4)
    assert marks.look(second, 6) == 0
    marks.lower(5)
    assert (marks.look(first, 8), marks.look(second, 8)) == (4, 5)
    assert marks.look(first, 8) == 8


def test_a_context_knows_what_is_tentative():
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
