"""The native kernel's attention to token trees: each row has the bits of the chain that its path is."""

import random

import pytest
import torch

from offload.kernels.accumulate import KernelAccumulator
from tests.support.native_kernel import DTYPES, NAN, attention, draw, fill_blocks, partial_results, scatter_blocks

pytestmark = pytest.mark.xdist_group("native")

# Tokens before the tree, tokens of it, head size, query heads of a KV head, and what the logits are like.
CASES = [
    (0, 1, 64, 3, "random"),
    (0, 40, 64, 3, "random"),
    (1, 9, 80, 1, "extreme"),
    (15, 24, 64, 4, "random"),
    (16, 33, 128, 1, "random"),
    (31, 17, 16, 7, "extreme"),
    (40, 64, 32, 3, "random"),
    (100, 10, 256, 2, "extreme"),
    (480, 48, 32, 1, "random"),
    (495, 24, 96, 1, "extreme"),
    (511, 12, 64, 3, "random"),
    (512, 12, 64, 1, "random"),
    (513, 9, 16, 17, "random"),
    (1020, 70, 16, 1, "extreme"),
]


def random_tree(tokens, seed):
    """Return parents `[tokens]`, int32, of a tree anywhere between a chain and a star, with one root or several."""
    rng = random.Random(seed)
    reach, roots = rng.choice([1, 2, 4, tokens]), rng.choice([0.0, 0.1])
    parents = [-1 if rng.random() < roots or not i else rng.randrange(max(i - reach, 0), i) for i in range(tokens)]
    if tokens > 2:
        parents[-1] = parents[-2]  # never a chain
    return torch.tensor(parents, dtype=torch.int32)


def path_to(parents, token):
    """Return a token and its ancestors, from the root down."""
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def some_paths(parents):
    """Return the paths to the last token, and to one of the deepest."""
    paths = [path_to(parents, token) for token in range(len(parents))]
    return [paths[-1], max(paths, key=len)]


def inputs(start, tokens, head_dim, group, dtype, kind="random", kv_heads=2):
    """Return q of a tree, keys and values of `start` tokens before it and of its own; extreme: products of 10^4."""
    q = draw(tokens, kv_heads * group, head_dim)
    k, v = (draw(kv_heads, start + tokens, head_dim, seed=seed) for seed in (1, 2))
    return (q * 1e3 if kind == "extreme" else q).to(dtype), k.to(dtype), v.to(dtype)


def chain_attention(kernel, q, k, v, start, path):
    """Attend to the chain that a path is: its keys and values stand in order behind the first `start`."""
    k, v = (torch.cat((x[:, :start], x[:, start:][:, path]), dim=1) for x in (k, v))
    return attention(kernel, q[path].contiguous(), fill_blocks(k, v), start + 1)


def assert_chains(found, kernel, q, k, v, start, parents):
    for path in some_paths(parents):
        expected = chain_attention(kernel, q, k, v, start, path)
        assert all(torch.equal(ours[path], theirs) for ours, theirs in zip(found, expected, strict=True)), path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("start", "tokens", "head_dim", "group", "kind"), CASES)
def test_a_row_has_the_bits_of_its_chain(kernel, set_threads, dtype, start, tokens, head_dim, group, kind):
    q, k, v = inputs(start, tokens, head_dim, group, dtype, kind)
    parents, blocks, table = random_tree(tokens, start), fill_blocks(k, v), None
    if start % 2:
        blocks, table = scatter_blocks(blocks)
    set_threads(1)
    found = attention(kernel, q, blocks, start + 1, table, parents=parents)
    assert_chains(found, kernel, q, k, v, start, parents)
    set_threads(2)
    assert_merged(found, kernel, q, blocks, start + 1, table, parents)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("last", [1, 7, 23])
def test_the_last_tokens_of_a_tree_are_the_same_alone(kernel, dtype, shape, last):
    """Earlier tokens of the tree are stored already; a drafter runs it depth by depth."""
    q, k, v = inputs(500, 24, 64, 3, dtype)
    parents = random_tree(24, 7) if shape == "tree" else torch.arange(-1, 23, dtype=torch.int32)
    whole = attention(kernel, q, blocks := fill_blocks(k, v), 501, parents=parents)
    some = attention(kernel, q[-last:].contiguous(), blocks, 501, parents=parents)
    assert all(torch.equal(one[-last:], other) for one, other in zip(whole, some, strict=True))
    assert_merged(some, kernel, q[-last:].contiguous(), blocks, 501, None, parents)


def assert_merged(expected, kernel, q, blocks, seen, table, parents):
    """The partial results of the pieces, merged as stores over tiers do, have the bits of attention in one store."""
    merged, lse = KernelAccumulator(kernel, q), torch.empty(q.shape[:2])
    merged.add(slice(None), partial_results(kernel, q, blocks, seen, table, parents))
    assert torch.equal(merged.output(lse), expected[0].to(q.dtype)) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sibling_is_not_seen(kernel, dtype):
    """NaN in the keys and values of a token reaches its own rows and its descendants', and no others."""
    start, parents = 45, torch.tensor([-1, 0, 0, 1, 1, 2, 4], dtype=torch.int32)
    clean = inputs(start, len(parents), 64, 3, dtype)
    expected = attention(kernel, clean[0], fill_blocks(*clean[1:]), start + 1, parents=parents)
    for token in range(1, len(parents)):
        q, k, v = (x.clone() for x in clean)
        k[:, start + token] = v[:, start + token] = NAN
        found = attention(kernel, q, fill_blocks(k, v), start + 1, parents=parents)
        for row in range(len(parents)):
            for ours, theirs in zip(found, expected, strict=True):
                if token in path_to(parents, row):
                    assert ours[row].isnan().all()
                else:
                    assert torch.equal(ours[row], theirs[row])


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 5], [-1, -2]])
def test_a_parent_behind_its_child_is_refused(kernel, parents):
    q, k, v = inputs(5, 2, 16, 1, torch.float32)
    with pytest.raises(ValueError, match="before"):
        attention(kernel, q, fill_blocks(k, v), 6, parents=torch.tensor(parents, dtype=torch.int32))
