"""Verification of trees as it runs on a device, against Sequoia's Algorithm 2 and the like written for the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import TriforceError
from offload.settings.tree_settings import TreeSampling
from offload.speculation.drafters.drafter import Draft
from offload.speculation.trees import tree_verification
from offload.speculation.trees.tree import ROOT, Tree, Verdict, chain
from offload.speculation.trees.tree_verification import draw_children, verify_tree
from offload.speculation.trees.verification import verify
from tests.support.drawing import draw_slowly

VOCAB = 12
WITHOUT, WITH, TOP_K = TreeSampling.WITHOUT_REPLACEMENT, TreeSampling.WITH_REPLACEMENT, TreeSampling.TOP_K


def slow_verify_tree(tokens, parents, rows, target, generator, sampling):
    """Try one child after another on the host, with the same random numbers."""
    chance = torch.rand(len(tokens), generator=generator).tolist()
    path, node = [], ROOT
    while True:
        p, tried, is_accepted = target[node + 1].double(), [], False
        q = None if rows is None or sampling is TOP_K else rows[node + 1].double()
        for child in Tree(parents).children[node + 1]:
            token = tokens[child]
            now = torch.zeros_like(p).index_fill(0, torch.tensor(token), 1.0) if q is None else q
            if chance[child] * now[token] < p[token]:
                path, node, is_accepted = [*path, child], child, True
                break
            tried.append(token)
            if (p > now).any():
                p = (p - now).clamp(min=0) / (p - now).clamp(min=0).sum()
            if sampling is WITHOUT and q is not None:
                q = q.clone()
                q[tried] = 0
                left = torch.ones(VOCAB).double().index_fill(0, torch.tensor(tried), 0.0)
                q = q / q.sum() if q.sum() > 0 else left / left.sum()
        if not is_accepted:
            return Verdict(path, draw_slowly(p, generator))


def distributions(rows, kind, generator):
    """Return distributions: smooth, sharp, of two tokens, or one-hot."""
    logits = torch.randn(rows, VOCAB, generator=generator) * (6 if kind == "sharp" else 1)
    kept = {"two": 2, "one-hot": 1}.get(kind, VOCAB)
    least = logits.topk(kept).values[:, -1:]
    return logits.masked_fill(logits < least, float("-inf")).softmax(-1)


def grown(parents, rows, sampling, generator):
    """Return tokens for a tree whose rows are known before: each node's children drawn from its row."""
    tree, tokens = Tree(parents), [0] * len(parents)
    for head, children in enumerate(tree.children):
        drawn = draw_children(rows[head : head + 1], len(children), generator, sampling)[0] if children else []
        for child, token in zip(children, drawn, strict=True):
            tokens[child] = int(token)
    return tokens


@st.composite
def trees(draw, most=12):
    """Random trees, as parents."""
    return [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, most)))]


KINDS = st.sampled_from(["smooth", "sharp", "two", "one-hot"])


@pytest.mark.parametrize("device_path", ["_try_on_the_way", "_try_at_once"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(trees(), KINDS, KINDS, st.sampled_from(["drawn", "same", "certain"]), st.sampled_from(TreeSampling), st.data())
def test_path_and_token_equal_those_of_the_host(device_path, parents, p_kind, q_kind, relation, sampling, data):
    seed = data.draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    p, q = (distributions(len(parents) + 1, kind, generator) for kind in (p_kind, q_kind))
    if relation == "same":
        q = p.clone()
    tokens = grown(parents, q, WITHOUT if relation == "certain" else sampling, generator)
    draft = tokens, parents, None if relation == "certain" else q, p
    expected = slow_verify_tree(*draft, torch.Generator().manual_seed(seed), sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_verification, "_try_on_the_way", getattr(tree_verification, device_path))
        assert verify_tree(*draft, torch.Generator().manual_seed(seed), sampling) == expected


@pytest.mark.parametrize("sampling", [WITHOUT, WITH])
@pytest.mark.parametrize("rows", ["drawn", "certain"])
def test_a_chain_is_verified_as_by_the_chains_own_function(sampling, rows):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        p, q = distributions(5, "smooth", generator), distributions(5, "smooth", generator)
        tokens, q = grown(chain(4), q, sampling, generator), None if rows == "certain" else q
        count, token = verify(Draft(tokens, None if q is None else q[:-1]), p, torch.Generator().manual_seed(seed))
        verdict = verify_tree(tokens, chain(4), q, p, torch.Generator().manual_seed(seed), sampling)
        assert verdict == (list(range(count)), token)


@pytest.mark.parametrize("rows", [None, torch.full((4, VOCAB), 1 / VOCAB)])
def test_a_row_of_nan_is_an_error(rows):
    target = torch.full((4, VOCAB), 1 / VOCAB)
    target[2] = float("nan")
    with pytest.raises(TriforceError, match="no numbers"):
        verify_tree([1, 2, 3], (ROOT, ROOT, 0), rows, target, torch.Generator().manual_seed(0))


def test_a_rejection_at_rounding_distance_does_not_end_in_an_impossible_token(monkeypatch):
    """Both tokens that p allows are children, and rounding rejects both: the token still follows p."""
    rand = torch.rand  # also draws the token that follows, by a number alone
    monkeypatch.setattr(
        torch, "rand", lambda size, **more: rand(1, **more) if size == 1 else torch.full((size,), 1 - 2**-24)
    )
    p = torch.tensor([[0.0, 0.7, 0.3], [1, 0, 0], [1, 0, 0]]) * (1 - 1e-6)
    verdicts = [verify_tree([1, 2], (ROOT, ROOT), None, p, torch.Generator().manual_seed(s)) for s in range(20)]
    assert {(tuple(verdict.path), verdict.token) for verdict in verdicts} == {((), 1), ((), 2)}
