"""Conversions between the measures of acceptance."""

import pytest

from offload.speculation.passes.estimators import expected_tokens, token_rate


@pytest.mark.parametrize("gamma", [1, 2, 6, 16])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9, 0.99])
def test_a_rate_a_token_is_found_again_from_the_share_of_drafted_tokens(rate, gamma):
    share = (expected_tokens(rate, gamma) - 1) / gamma
    assert share <= rate * (1 + 1e-9)
    assert token_rate(share, gamma) == pytest.approx(rate, abs=1e-6)


def test_the_published_acceptance_of_triforce_as_a_rate_a_token():
    """92.34 % of drafts of 6 tokens is 97.7 % of single tokens (arXiv 2404.11912, table of temperatures)."""
    assert token_rate(0.9234, 6) == pytest.approx(0.977, abs=5e-4)
    assert token_rate(0.0, 6) == pytest.approx(0, abs=1e-6)
    assert token_rate(1.0, 6) == pytest.approx(1)
