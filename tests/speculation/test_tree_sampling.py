"""The tokens that a node's children and its residual give are distributed as the target, by exact enumeration."""

import itertools

import pytest
import torch

from offload.settings.tree_settings import TreeSampling
from offload.speculation.trees.tree_verification import Siblings, draw_children
from tests.support.table_models import chi_square_p

VOCAB = 4
WITHOUT, WITH = TreeSampling.WITHOUT_REPLACEMENT, TreeSampling.WITH_REPLACEMENT
P = torch.tensor([0.45, 0.3, 0.2, 0.05], dtype=torch.double)
DRAFTERS = {
    "good": [0.4, 0.3, 0.1, 0.2],
    "uniform": [0.25] * VOCAB,
    "adversarial": [0.05, 0.1, 0.15, 0.7],
    "one-hot": [0.0, 1.0, 0.0, 0.0],
    "two tokens": [0.0, 0.5, 0.0, 0.5],
    "identical": P.tolist(),
}


def probability(children, q, sampling):
    """Return the probability that `children` are drawn in this order."""
    product, left = 1.0, dict(enumerate(q))
    for token in children:
        if token not in left:
            return 0.0
        mass = sum(left.values())
        product *= left[token] / mass if mass else 1 / len(left)
        if sampling is WITHOUT:
            del left[token]
    return product


def output(q, count, drawing, sampling, siblings_type=Siblings):
    """Return the exact distribution of the next token: `count` children drawn and then tried, and the residual.

    Each combination of children is a node, so that all are tried at once.
    """
    combinations = [each for each in itertools.product(range(VOCAB), repeat=count) if probability(each, q, drawing)]
    weight = torch.tensor([probability(each, q, drawing) for each in combinations], dtype=torch.double)
    rows = torch.tensor([q], dtype=torch.double).expand(len(combinations), -1)
    siblings = siblings_type(P.expand(len(combinations), -1), rows, sampling)
    result = torch.zeros(VOCAB, dtype=torch.double)
    for tokens in torch.tensor(combinations).T:
        p, q_tokens = siblings.probabilities(tokens)
        accepted = torch.where(q_tokens > 0, p / q_tokens, (p > 0).double()).clamp(max=1)
        result.index_add_(0, tokens, weight * accepted)
        weight = weight * (1 - accepted)
        siblings.reject(tokens)
    return result + weight @ siblings.p


@pytest.mark.parametrize("sampling", [WITHOUT, WITH])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_token_is_distributed_as_the_target(drafter, count, sampling):
    assert torch.allclose(output(DRAFTERS[drafter], count, sampling, sampling), P, atol=1e-12)


def test_verifying_draws_without_replacement_as_draws_with_it_is_detected():
    assert not torch.allclose(output(DRAFTERS["adversarial"], 2, WITHOUT, WITH), P, atol=1e-3)
    assert not torch.allclose(output(DRAFTERS["adversarial"], 2, WITH, WITHOUT), P, atol=1e-3)


class NotRenormalised(Siblings):
    """Leaves q as it is without the rejected token."""

    def _renormalised(self, tokens):
        return self._untried.scatter_(1, tokens.unsqueeze(1), 0)


class NeverUniform(Siblings):
    """Goes on with q = 0 where it is used up."""

    def _renormalised(self, tokens):
        untried = self._untried.scatter_(1, tokens.unsqueeze(1), 0)
        return untried / untried.sum(dim=-1, keepdim=True).clamp(min=1e-30)


@pytest.mark.parametrize(("fault", "drafter"), [(NotRenormalised, "adversarial"), (NeverUniform, "two tokens")])
def test_a_wrong_q_after_a_rejection_is_detected(fault, drafter):
    assert not torch.allclose(output(DRAFTERS[drafter], 3, WITHOUT, WITHOUT, fault), P, atol=1e-3)


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("good", WITHOUT), ("good", WITH), ("one-hot", WITHOUT), ("two tokens", WITHOUT), ("two tokens", WITH)],
)
def test_children_are_drawn_with_the_probabilities_that_the_verification_assumes(drafter, sampling):
    q = DRAFTERS[drafter]
    children = draw_children(torch.tensor([q]).expand(20_000, -1), 3, torch.Generator().manual_seed(0), sampling)
    counts = (children @ torch.tensor([16, 4, 1])).bincount(minlength=64)
    expected = [probability(each, q, sampling) for each in itertools.product(range(VOCAB), repeat=3)]
    assert chi_square_p(counts, torch.tensor(expected, dtype=torch.double)) > 1e-3


def test_each_node_draws_from_its_own_row():
    rows = torch.eye(VOCAB)[[2, 0, 3]]
    for sampling in TreeSampling:
        children = draw_children(rows, 1, torch.Generator().manual_seed(0), sampling)
        assert children.tolist() == [[2], [0], [3]]


def test_top_k_children_are_the_likeliest_tokens_in_order():
    children = draw_children(torch.tensor([[0.1, 2.0, -1.0, 1.0]]), 3, torch.Generator(), TreeSampling.TOP_K)
    assert children.tolist() == [[1, 3, 0]]


def test_without_replacement_all_tokens_can_be_children():
    children = draw_children(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), VOCAB, torch.Generator().manual_seed(1), WITHOUT)
    assert children[0, 0] == 1 and sorted(children[0].tolist()) == [0, 1, 2, 3]
