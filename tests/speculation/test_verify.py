"""Verification as it runs on a device, against speculative sampling written for the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.speculation.drafters.drafter import Draft
from offload.speculation.trees.verification import verify
from tests.support.drawing import draw_slowly

VOCAB = 12


def slow_verify(draft, target, generator):
    """Speculative sampling, one decision after another on the host, with the same random numbers."""
    chance = torch.rand(len(draft.tokens), generator=generator) if draft.tokens else []
    accepted, row = len(draft.tokens), target[-1]
    for index, token in enumerate(draft.tokens):
        q = 1.0 if draft.rows is None else draft.rows[index, token]
        if chance[index] * q >= target[index, token]:
            accepted, row = index, target[index].clone()
            if draft.rows is None:
                row[token] = 0
            elif ((row - draft.rows[index]) > 0).any():
                row = (row - draft.rows[index]).clamp(min=0)
            break
    return accepted, draw_slowly(row, generator)


def distributions(rows, kind, generator):
    """Return distributions: smooth, sharp, or one-hot."""
    logits = torch.randn(rows, VOCAB, generator=generator) * {"smooth": 1, "sharp": 6, "one-hot": 1e6}[kind]
    return logits.softmax(-1)


KINDS = st.sampled_from(["smooth", "sharp", "one-hot"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 9), KINDS, KINDS, st.sampled_from(["drawn", "same", "one-hot"]), st.integers(0, 10_000))
def test_acceptance_and_token_equal_those_of_the_host(tokens, p_kind, q_kind, relation, seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = distributions(tokens + 1, p_kind, generator), distributions(tokens, q_kind, generator)
    if relation == "same":
        q = p[:tokens].clone()
    ids = q.multinomial(1, generator=generator)[:, 0].tolist() if tokens else []
    draft = Draft(ids, None if relation == "one-hot" else q)
    found, expected = (f(draft, p, torch.Generator().manual_seed(seed)) for f in (verify, slow_verify))
    assert found == expected


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_the_generator_is_left_as_the_host_leaves_it(tokens):
    p = distributions(tokens + 1, "smooth", torch.Generator().manual_seed(1))
    draft, after = Draft([0] * tokens, None), []
    for function in (verify, slow_verify):
        generator = torch.Generator().manual_seed(0)
        function(draft, p, generator)
        after.append(generator.get_state())
    assert torch.equal(*after)


def test_a_rejection_at_rounding_distance_draws_from_the_target():
    """p equals q but for rounding, and the last bit rejects: the residual is zero everywhere."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[0.5, 1.0]])  # q of the other token is too large: p - q is nowhere positive
    rejected = [verify(Draft([1], q), p, torch.Generator().manual_seed(seed)) for seed in range(200)]
    assert {(0, 0), (0, 1)} <= set(rejected)


def test_an_accepted_token_may_be_drawn_again():
    """Only a rejected token is left out of the residual."""
    p = torch.zeros(3, VOCAB).index_fill(1, torch.tensor([3]), 1.0)
    for rows in (None, p[:2]):
        assert verify(Draft([3, 3], rows), p, torch.Generator()) == (2, 3)
