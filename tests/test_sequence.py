"""The context: what is tentative, and what its followers learn of changes."""

from offload.sequence import Context, Watermarks, common_prefix


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
    context = Context([1, 2])
    context.extend([3])
    assert context.tentative == [3]
    context.commit()
    assert context.tentative == []
    context.restart([1, 9])
    assert (context.tokens, context.committed) == ([1, 9], 2)


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3], known=1) == 2
