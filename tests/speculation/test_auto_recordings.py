"""The policy of `auto` over recordings of real texts: greedy and sampled, in memory and over a slow link."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from tests.support.recorded_texts import METHODS, recordings, seconds_a_token

SEEDS = 4
LENGTHS = (64, 192)


@pytest.fixture(scope="module")
def ratios() -> dict[str, tuple[float, float]]:
    """The rate of `auto` in each cell: of plain decoding's, and of the best method's."""
    found = {}
    for recording in recordings():
        for place, times in recording["times"].items():
            for name, text in recording["texts"].items():
                for tokens in LENGTHS:
                    seconds = {
                        method: fmean(seconds_a_token(method, text, times, tokens, seed) for seed in range(SEEDS))
                        for method in (*METHODS, "auto")
                    }
                    auto = seconds.pop("auto")
                    cell = f"{recording['context']}, {place}, {name}, {tokens}"
                    found[cell] = seconds["ar"] / auto, min(seconds.values()) / auto
    return found


def mean(ratios, place: str) -> float:
    logs = [math.log(ratio) for name, (_, ratio) in ratios.items() if f", {place}," in name]
    return math.exp(fmean(logs))


def test_auto_is_never_slower_than_plain_decoding(ratios):
    assert {name: ratio for name, (ratio, _) in ratios.items() if ratio < 0.97} == {}


def test_auto_is_near_the_best_fixed_method_in_every_cell(ratios):
    assert {name: ratio for name, (_, ratio) in ratios.items() if ratio < 0.84} == {}
    assert sum(ratio < 0.9 for _, ratio in ratios.values()) <= len(ratios) // 10


@pytest.mark.parametrize("place", ["memory", "0.25 GB/s"])
def test_auto_is_nearly_the_best_fixed_method_on_average(ratios, place):
    assert mean(ratios, place) >= 0.95
