"""The order of a head's dimensions. Imports nothing heavy.

Scores do not change if the dimensions of q and of k change places together. So one decoder rotates all heads as
Llama's: dimension i with i + head_dim / 2. Families that rotate neighbours, or only some dimensions, have the rows of
their q and k weights reordered on loading; a pair that is not rotated has an angle of 0.
"""

from __future__ import annotations


def row_order(head_dim: int, rotary_dim: int, neighbours: bool) -> list[int]:
    """Return which dimension of a checkpoint's head comes at each place of the decoder's.

    Args:
        rotary_dim: how many dimensions are rotated, the first ones; even.
        neighbours: whether the checkpoint rotates 2i with 2i + 1, and not i with i + rotary_dim / 2.
    """
    rotated, rest = list(range(rotary_dim)), list(range(rotary_dim, head_dim))
    half, middle = rotary_dim // 2, len(rest) // 2
    low, high = (rotated[::2], rotated[1::2]) if neighbours else (rotated[:half], rotated[half:])
    return low + rest[:middle] + high + rest[middle:]
