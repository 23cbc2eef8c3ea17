"""The tables of RoPE, which are computed in pieces and grow by as little as is asked for."""

import pytest
import torch

from offload.architecture.rope import Rope
from tests.support.stores import tiny_shape

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_have_the_bits_of_a_whole_table(dtype):
    shape, length = tiny_shape(), 2**14 + 1000
    inverse = 1.0 / shape.rope["rope_theta"] ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(2 * length).float(), inverse)
    both = torch.cat((angles, angles), dim=-1)
    expected = both.cos().to(dtype), both.sin().to(dtype)
    rope = Rope(shape, length, dtype, CPU)
    for end in (length, length + 1, 2 * length):  # the tables grow twice
        for found, whole in zip(rope.rows(0, end), expected, strict=True):
            assert found.dtype == dtype and torch.equal(found.squeeze(1), whole[:end])
