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
    """The tables of arXiv 2404.11912 have rates a token: their authors' runs and figure 5 show it.

    Retrieval without hierarchy, published with .9126, has .7350 of drafts of 6 tokens in the authors' report
    A100_Ablation_wo_chain.csv (ranonrkm/TriForce-legacy). The most that any draft length can give, 13.1 and 1.87 tokens
    in figure 5, is 1 / (1 - a) for .9234 and .4649. Read as a share of drafts of 6, .9234 would be .977 a token.
    """
    assert token_rate(0.7350, 6) == pytest.approx(0.9126, abs=5e-5)
    assert expected_tokens(0.9234, 10_000) == pytest.approx(13.1, abs=0.05)
    assert expected_tokens(0.4649, 10_000) == pytest.approx(1.87, abs=0.005)
    assert token_rate(0.9234, 6) == pytest.approx(0.977, abs=5e-4)
    assert token_rate(0.0, 6) == pytest.approx(0, abs=1e-6)
    assert token_rate(1.0, 6) == pytest.approx(1)
