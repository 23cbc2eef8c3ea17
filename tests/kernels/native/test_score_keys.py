"""The products of queries and keys in panels, by the native kernel at every level, against the definition in fp64."""

import pytest
import torch

from offload.kernels.native.layout import new_key_panels, write_key_panels
from tests.support.native_kernel import DTYPES, NAN, distance, draw

CASES = [(1, 1, 1, 16), (3, 33, 40, 80), (5, 1100, 1200, 64), (1, 513, 513, 256)]  # heads, keys, room, head_dim


def in_panels(keys, room):
    panels = new_key_panels(len(keys), room, keys.shape[2], keys.dtype).fill_(NAN)
    for start in range(0, keys.shape[1], 7):  # written as they come, across the borders of panels
        write_key_panels(panels, start, keys[:, start : start + 7])
    return panels


def score(kernel, query, panels, count):
    found = torch.full((len(query), count + 3), NAN)
    kernel.score_keys(query, panels, found[:, :count])
    assert found[:, count:].isnan().all(), "nothing behind the last key"
    return found[:, :count]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_the_products(kernel, dtype, case):
    heads, count, room, head_dim = case
    query, keys = draw(heads, head_dim, dtype=dtype), draw(heads, count, head_dim, dtype=dtype, seed=1)
    found = score(kernel, query, in_panels(keys, room), count)
    wanted = torch.einsum("hkd,hd->hk", keys.double(), query.double())
    assert distance(found, wanted) < 1e-6  # fp32 sums of exact products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_have_the_same_bits_with_any_number_of_threads_and_keys(kernel, set_threads, dtype):
    query, keys = draw(3, 64, dtype=dtype), draw(3, 1500, 64, dtype=dtype, seed=1)
    panels, found = in_panels(keys, 1500), []
    for threads, count in ((1, 1500), (2, 1500), (3, 1001)):
        set_threads(threads)
        found.append(score(kernel, query, panels, count))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0][:, :1001], found[2])
