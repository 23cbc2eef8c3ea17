"""Drawing from a distribution as the CPU does, written for the host."""

import math

import torch


def draw_slowly(row, generator):
    """Return the token of a row, normalised or not, that one random number chooses, token after token."""
    left = float(torch.rand((), generator=generator, dtype=torch.float64)) * math.fsum(row.tolist())
    for token, chance in enumerate(row.tolist()):
        if left < chance:
            return token
        left -= chance
    raise AssertionError("the number was as large as the sum")
