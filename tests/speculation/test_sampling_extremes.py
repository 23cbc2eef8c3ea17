"""Any sampling settings that are accepted can be sampled with, at their extremes too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import SettingsError
from offload.sequence import TokenSequence
from offload.settings.config import Sampling
from offload.speculation.sampling.noise import Noise
from offload.speculation.sampling.warp import keep_top_p_at_once, keep_top_p_by_row
from tests.support.table_models import PROMPT, VOCAB, hierarchy

LEAST = 5e-324  # above 0
EXTREMES = {
    "temperature": [0.0, LEAST, 1e-5, 0.6, 1e6],
    "top_p": [LEAST, 1e-9, 0.9, 1 - 2**-53, 1.0],
    "top_k": [0, 1, 3, 2**31 - 1],
    "min_p": [0.0, LEAST, 0.5, 1.0],
    "repetition_penalty": [0.01, 1.0, 1.1, 100.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "dry_multiplier": [0.0, 1e-6, 0.8, 100.0],
    "dry_base": [1.0, 1 + 2**-52, 1.75, 100.0],
    "dry_allowed_length": [1, 2, 2**31 - 1, 2**31, 2**40],
    "dry_range": [0, 1, 2**31, 2**40],
    "no_repeat_ngram": [0, 1, 2, 2**31, 2**40],
    "coupled": [False, True],
}
SAMPLING = st.builds(Sampling, **{name: st.sampled_from(values) for name, values in EXTREMES.items()})
METHODS = [
    ("ar", "lookup", "chain"),
    ("lookup", "lookup", "chain"),
    ("naive", "good", "k-ary:2x2"),
    ("triforce", "lookup", "5"),
]


def repetitive(count=60):
    return [*PROMPT * (count // len(PROMPT)), 7]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SAMPLING, st.sampled_from(METHODS), st.sampled_from([0, 2**63 - 1]))
def test_accepted_settings_raise_nothing(sampling, method, seed):
    name, draft, tree = method
    noise = Noise(seed) if sampling.coupled and not sampling.greedy else None
    top = hierarchy(name, draft, sampling, (2, 2), penalised=True, noise=noise, tree=tree).top
    sequence = TokenSequence(repetitive())
    while len(sequence) < 72:
        assert all(0 <= token < VOCAB for token in top.advance(sequence, 5).tokens)


def refusal(**chosen):
    """Return why settings are refused."""
    with pytest.raises(SettingsError) as caught:
        Sampling(**chosen)
    return caught.value.message


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([float("nan"), float("inf"), -float("inf"), -1e308, 1e308, -3.0]),
    st.sampled_from([name for name in EXTREMES if name != "coupled"]),
)
def test_numbers_out_of_bounds_are_refused_by_name(value, name):
    """With a number, or with one of thousands of digits, which Python refuses to print."""
    for number in (value, 10**5000, -(10**5000)):
        assert refusal(**{name: number}).startswith(f"{name.replace('_', '-')} is ")


@pytest.mark.parametrize("value", [1e-320, 9e-7, -1e-9, 1e308, float("inf"), float("nan")])
def test_a_multiplier_of_dry_that_is_far_too_small_is_refused(value):
    with pytest.raises(SettingsError, match="dry-multiplier is "):
        Sampling(dry_multiplier=value)


@pytest.mark.parametrize("keep", [keep_top_p_by_row, keep_top_p_at_once])
@pytest.mark.parametrize("p", EXTREMES["top_p"])
def test_any_top_p_keeps_a_token(keep, p):
    kept = keep(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), p)
    assert kept.isfinite().any(dim=-1).all()
