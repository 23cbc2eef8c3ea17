"""The choice of drafts, on a machine and a text that are made up: never much slower, and faster where it can be."""

import random

import pytest

from offload.sequence import TokenSequence
from offload.speculation.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.drafter import Draft
from offload.speculation.estimators import Acceptance, DraftTimes, StepTimes, expected_tokens


class Fake:
    """A drafter whose drafts are accepted with a given probability, at a given time a token."""

    def __init__(self, name, acceptance, seconds, share=0.2, prior=0.6):
        self.name, self.acceptance, self.seconds = name, acceptance, seconds
        self.share, self.prior = share, prior

    def outlook(self, sequence):
        return self.name


def step(rows):
    """Seconds of a verification: a fifth more for each further row."""
    return 1 + 0.2 * (rows - 1)


def simulated(pace, tokens, hiccup=None, step=step, seed=0):
    """Seconds a token over so many tokens, and the share of cycles that drafted; a plain step takes 1 second."""
    rng, emitted, seconds, drafts, cycles = random.Random(seed), 0, 0.0, 0, 0
    while emitted < tokens:
        drafter, gamma = pace.choose(TokenSequence([0]), tokens)
        accepted = 0
        rate = 0.0 if drafter is None else drafter.acceptance(emitted)
        while accepted < gamma and rng.random() < rate:
            accepted += 1
        cycles, drafts = cycles + 1, drafts + (gamma > 0)
        draft_s = 0.0 if drafter is None else gamma * drafter.seconds
        verify_s = step(gamma + 1) * (hiccup if hiccup and cycles == 50 else 1)
        pace.observe(Cycle(drafter if gamma else None, 0, gamma, accepted, draft_s, verify_s))
        emitted += accepted + 1
        seconds += draft_s + min(verify_s, step(gamma + 1))
    return seconds / emitted, drafts / cycles


def always(rate):
    return lambda place: rate


@pytest.mark.parametrize("seconds", [0.001, 0.3, 1.0])
def test_drafts_that_always_fail_cost_less_than_five_percent(seconds):
    pace = AdaptiveScheduler([Fake("bad", always(0.0), seconds)], rests=True)
    each, drafting = simulated(pace, 1000)
    assert each < 1.05
    assert 0 < drafting < 0.1  # it goes on trying, now and then


@pytest.mark.parametrize(("rate", "gamma"), [(0.8, 3), (0.95, 6)])
def test_good_drafts_reach_most_of_what_the_best_fixed_length_would(rate, gamma):
    best = (gamma * 0.05 + step(gamma + 1)) / expected_tokens(rate, gamma)
    for rests in (True, False):
        each, _ = simulated(AdaptiveScheduler([Fake("good", always(rate), 0.05)], rests=rests), 2000)
        assert each < 1.15 * best


def test_it_comes_back_when_the_text_does():
    drafter = Fake("changing", lambda place: 0.95 if place > 1000 else 0.0, 0.01)
    pace = AdaptiveScheduler([drafter], rests=True)
    before, _ = simulated(pace, 1000)
    drafter.acceptance = always(0.95)
    after, _ = simulated(pace, 1000)
    assert before < 1.05
    assert after < 0.6


def test_the_better_of_two_drafters_is_used():
    pace = AdaptiveScheduler([Fake("bad", always(0.1), 0.01), Fake("good", always(0.9), 0.01)], rests=True)
    each, _ = simulated(pace, 2000)
    assert each < 0.6


@pytest.mark.parametrize("hiccup", [10, 100, 1000])
def test_a_hiccup_of_the_machine_is_not_held_against_drafting(hiccup):
    """A laptop that was asleep, a process that was stopped."""
    usual, _ = simulated(AdaptiveScheduler([Fake("good", always(0.9), 0.01)], rests=True), 2000)
    found, _ = simulated(AdaptiveScheduler([Fake("good", always(0.9), 0.01)], rests=True), 2000, hiccup)
    assert found < 1.1 * usual


def test_what_costs_nothing_to_ask_is_asked_while_resting():
    class Free(Fake):
        def propose(self, sequence, limit):
            return Draft([7], None)

    free = Free("free", always(0.0), 0.0, share=0.0, prior=0.05)
    pace = AdaptiveScheduler([free], rests=True)
    for _ in range(40):
        drafter, gamma = pace.choose(TokenSequence([0]), 10)
        pace.observe(Cycle(drafter, 7, gamma, gamma, 0.0, step(gamma + 1)))
    assert drafter is free  # it was right all the time


def test_a_guess_is_only_compared_with_the_step_that_it_was_made_for():
    """A plain step that asks nobody must not be taken for the answer to an earlier question."""

    class Free(Fake):
        def propose(self, sequence, limit):
            return Draft([7], None)

    pace = AdaptiveScheduler([Free("free", always(0.0), 0.0, share=0.0, prior=0.05)], rests=True)
    for limit, first in ((10, 7), (10, 7), (10, 7), *((0, 8),) * 20):  # asked once, then there is no room to draft
        drafter, gamma = pace.choose(TokenSequence([0]), limit)
        pace.observe(Cycle(drafter, first, gamma, 0, 0.0, step(gamma + 1)))
    (acceptance,) = pace._acceptance.values()
    assert acceptance._judged <= 1  # one guess


def test_a_fixed_length_is_kept_but_for_the_room_there_is():
    pace = AdaptiveScheduler([Fake("any", always(0.0), 0.1)], gamma=5)
    pace.choose(TokenSequence([0]), 30)
    assert pace.choose(TokenSequence([0]), 30)[1] == 5
    assert pace.choose(TokenSequence([0]), 3)[1] == 3
    assert pace.choose(TokenSequence([0]), 0) == (None, 0)


def test_acceptance_moves_and_is_forgotten():
    rate = Acceptance(prior=0.5)
    assert rate.rate(0) == 0.5
    for cycle in range(50):
        rate.observe(cycle, 4, 4)
    assert rate.rate(50) > 0.9
    for cycle in range(50, 60):
        rate.observe(cycle, 4, 0)
    assert rate.rate(60) < 0.8
    assert abs(rate.rate(2000) - 0.5) < 0.01


def test_tokens_behind_a_rejected_one_are_not_judged():
    rate = Acceptance(prior=0.5, weight=0.001)
    rate.observe(0, 8, 3)
    assert abs(rate.rate(0) - 3 / 4) < 0.01


def test_step_times_are_interpolated_and_single_outliers_not_believed():
    times = StepTimes()
    times.observe(1, 1.0)
    for _ in range(30):
        times.observe(1, 1.0)
        times.observe(5, 2.0)
    assert abs(times.of(3) - 1.5) < 0.1
    assert times.of(9) > times.of(5)
    times.observe(1, 100.0)
    assert times.of(1) < 1.5


def test_the_first_draft_pays_for_setting_up():
    times = DraftTimes()
    times.observe(1, 50.0)
    assert times.of(0.3) == 0.3
    times.observe(4, 2.0)
    assert times.of(0.3) == 0.5


def test_expected_tokens():
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(1, 5) == 6
    assert abs(expected_tokens(0.9, 16) - 8.3) < 0.05  # the figure in the TriForce discussion of limits
