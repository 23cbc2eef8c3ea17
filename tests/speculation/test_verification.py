"""Verification of chains and trees, against Sequoia's Algorithm 2 and the like written for the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import TriforceError
from offload.settings.tree_settings import TreeSampling
from offload.speculation.trees.tree import ROOT, Draft, Tree, Verdict, chain
from offload.speculation.trees.verification import draw_children, verify

VOCAB = 12
WITHOUT, WITH, TOP_K = TreeSampling.WITHOUT_REPLACEMENT, TreeSampling.WITH_REPLACEMENT, TreeSampling.TOP_K


def draw_slowly(row, generator):
    """Return the token of a row that one random number chooses, as the CPU draws, token after token."""
    left = float(torch.rand((), generator=generator, dtype=torch.float64)) * float(row.double().sum())
    for token, chance in enumerate(row.tolist()):
        if left < chance:
            return token
        left -= chance
    raise AssertionError("the number was as large as the sum")


def slow_verify(draft, target, generator, sampling=WITHOUT):
    """Try one child after another on the host, with the same random numbers."""
    parents = chain(len(draft.tokens)) if draft.parents is None else draft.parents
    has_rows = draft.rows is not None and not (sampling is TOP_K and draft.parents is not None)
    chance = torch.rand(len(draft.tokens), generator=generator).tolist() if draft.tokens else []
    path, node = [], ROOT
    while True:
        p, tried, is_accepted = target[node + 1].double(), [], False
        children = Tree(parents).children[node + 1]
        q = draft.rows[node + 1].double() if has_rows and children else None
        for child in children:
            token = draft.tokens[child]
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
    tokens = [0] * len(parents)
    for head, children in enumerate(Tree(parents).children):
        drawn = draw_children(rows[head : head + 1], len(children), generator, sampling)[0] if children else []
        for child, token in zip(children, drawn, strict=True):
            tokens[child] = int(token)
    return tokens


TREES = st.integers(0, 12).flatmap(lambda size: st.tuples(*(st.integers(ROOT, node - 1) for node in range(size))))
KINDS = st.sampled_from(["smooth", "sharp", "two", "one-hot"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.one_of(TREES, st.integers(0, 9)),  # a number is a chain's
    KINDS,
    KINDS,
    st.sampled_from(["drawn", "same", "certain"]),
    st.sampled_from(TreeSampling),
    st.integers(0, 10_000),
)
def test_path_token_and_generator_equal_those_of_the_host(shape, p_kind, q_kind, relation, sampling, seed):
    parents = chain(shape) if isinstance(shape, int) else shape
    generator = torch.Generator().manual_seed(seed)
    p, q = (distributions(len(parents) + 1, kind, generator) for kind in (p_kind, q_kind))
    if relation == "same":
        q = p.clone()
    tokens = grown(parents, q, WITHOUT if relation == "certain" else sampling, generator)
    draft = Draft(tokens, None if relation == "certain" else q, None if isinstance(shape, int) else shape)
    results = []
    for function in (verify, slow_verify):
        generator = torch.Generator().manual_seed(seed)
        results.append((function(draft, p, generator, sampling), generator.get_state().tolist()))
    assert results[0] == results[1]


def test_a_rejection_at_rounding_distance_draws_from_the_target():
    """p equals q but for rounding, and the last bit rejects: the residual is zero everywhere."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[0.5, 1.0]])  # q of the other token is too large: p - q is nowhere positive
    verdicts = [verify(Draft([1], q), p, torch.Generator().manual_seed(seed)) for seed in range(200)]
    assert {((), 0), ((), 1)} <= {(tuple(verdict.path), verdict.token) for verdict in verdicts}


def test_a_rejection_of_all_that_is_possible_does_not_end_in_an_impossible_token(monkeypatch):
    """Both tokens that p allows are children, and rounding rejects both: the token still follows p."""
    rand = torch.rand  # also draws the token that follows, by a number alone
    monkeypatch.setattr(
        torch, "rand", lambda size, **more: rand(1, **more) if size == 1 else torch.full((size,), 1 - 2**-24)
    )
    p = torch.tensor([[0.0, 0.7, 0.3], [1, 0, 0], [1, 0, 0]]) * (1 - 1e-6)
    draft = Draft([1, 2], None, (ROOT, ROOT))
    verdicts = [verify(draft, p, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert {(tuple(verdict.path), verdict.token) for verdict in verdicts} == {((), 1), ((), 2)}


@pytest.mark.parametrize("rows", [None, torch.full((4, VOCAB), 1 / VOCAB)])
@pytest.mark.parametrize("parents", [None, (ROOT, ROOT, 0)])
def test_a_row_of_nan_is_an_error(parents, rows):
    target = torch.full((4, VOCAB), 1 / VOCAB)
    target[2] = float("nan")
    with pytest.raises(TriforceError, match="no numbers"):
        verify(Draft([1, 2, 3], rows, parents), target, torch.Generator().manual_seed(0))
