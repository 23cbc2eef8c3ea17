"""The scheduler on simulated times and acceptance rates: never much slower than plain decoding, faster if possible."""

import random

import pytest

from offload.sequence import TokenSequence
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.auto.drafter_estimates import DrafterEstimate
from offload.speculation.passes.estimators import StepTimes
from offload.speculation.trees.tree import Draft


class Fake:
    """A drafter with a given acceptance rate and a given time per token."""

    longest = 24

    def __init__(self, name, acceptance, seconds, relative_cost=0.2, prior=0.6):
        self.name, self.acceptance, self.seconds = name, acceptance, seconds
        self.relative_cost, self._prior, self.setups = relative_cost, prior, 0

    def prior(self, kind):
        return self._prior

    def draft_kind(self, sequence):
        return self.name

    def setup_cost(self, sequence):
        return 0.0


def step(rows):
    """Return the seconds of a verification: a fifth more for each further row."""
    return 1 + 0.2 * (rows - 1)


def simulated(scheduler, tokens, hiccup=None, step=step, seed=0):
    """Return the mean seconds per token, and the share of cycles that drafted; a plain step takes 1 second."""
    rng, emitted, seconds, drafts, cycles = random.Random(seed), 0, 0.0, 0, 0
    while emitted < tokens:
        drafter, gamma = scheduler.choose(TokenSequence([0]), tokens)
        accepted = 0
        rate = 0.0 if drafter is None else drafter.acceptance(emitted)
        while accepted < gamma and rng.random() < rate:
            accepted += 1
        cycles, drafts = cycles + 1, drafts + (gamma > 0)
        draft_s = 0.0 if drafter is None else gamma * drafter.seconds
        verify_s = step(gamma + 1) * (hiccup if hiccup and cycles == 50 else 1)
        scheduler.observe(Cycle(drafter if gamma else None, 0, gamma, accepted, draft_s, verify_s))
        emitted += accepted + 1
        seconds += draft_s + min(verify_s, step(gamma + 1))
    return seconds / emitted, drafts / cycles


def always(rate):
    return lambda position: rate


@pytest.mark.parametrize("seconds", [0.001, 0.3, 1.0])
def test_drafts_that_are_always_rejected_cost_less_than_five_percent(seconds):
    scheduler = AdaptiveScheduler([Fake("bad", always(0.0), seconds)], may_pause=True)
    each, drafting = simulated(scheduler, 1000)
    assert each < 1.05
    assert 0 < drafting < 0.15  # it tries again from time to time


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("may_pause", [True, False])
def test_the_reported_gain_is_the_measured_one(rate, may_pause):
    scheduler = AdaptiveScheduler([Fake("drafter", always(rate), 0.05)], may_pause=may_pause)
    each, drafting = simulated(scheduler, 1000)
    if drafting > 0.99:  # nothing was run to compare with
        assert scheduler.gain is None
    else:
        assert scheduler.gain.speedup == pytest.approx(1 / each, rel=0.02)
        assert scheduler.gain.step_s == pytest.approx(1, rel=0.02)


def test_drafting_resumes_when_acceptance_rises():
    drafter = Fake("changing", lambda position: 0.95 if position > 1000 else 0.0, 0.01)
    scheduler = AdaptiveScheduler([drafter], may_pause=True)
    before, _ = simulated(scheduler, 1000)
    drafter.acceptance = always(0.95)
    after, _ = simulated(scheduler, 1000)
    assert before < 1.05
    assert after < 0.6


@pytest.mark.parametrize("hiccup", [10, 100, 1000])
def test_a_pause_of_the_machine_does_not_count_against_drafting(hiccup):
    """Such as a suspended laptop, or a stopped process."""
    usual, _ = simulated(AdaptiveScheduler([Fake("good", always(0.9), 0.01)], may_pause=True), 2000)
    found, _ = simulated(AdaptiveScheduler([Fake("good", always(0.9), 0.01)], may_pause=True), 2000, hiccup)
    assert found < 1.1 * usual


def test_free_drafts_are_scored_during_plain_steps():
    class Free(Fake):
        def propose(self, sequence, limit, tree=None):
            return Draft([7], None)

    free = Free("free", always(0.0), 0.0, relative_cost=0.0, prior=0.05)
    scheduler = AdaptiveScheduler([free], may_pause=True)
    for _ in range(40):
        drafter, gamma = scheduler.choose(TokenSequence([0]), 10)
        scheduler.observe(Cycle(drafter, 7, gamma, gamma, 0.0, step(gamma + 1)))
    assert drafter is free  # it was right all the time


def test_a_guess_is_only_compared_with_the_step_that_it_was_made_for():
    """A plain step without a guess must not be compared with an earlier one."""

    class Free(Fake):
        def propose(self, sequence, limit, tree=None):
            return Draft([7], None)

    drafter = Free("free", always(0.0), 0.0, relative_cost=0.0, prior=0.05)
    scheduler = AdaptiveScheduler([drafter], may_pause=True)
    for limit, first in ((10, 7), (10, 7), (10, 7), *((0, 8),) * 20):  # then there is no room for a draft
        chosen, gamma = scheduler.choose(TokenSequence([0]), limit)
        scheduler.observe(Cycle(chosen, first, gamma, 0, 0.0, step(gamma + 1)))
    (estimate,) = scheduler._estimates
    assert estimate.acceptance[drafter.name]._tried[0] <= 2  # two guesses


def test_a_fixed_draft_length_is_only_cut_by_the_limit():
    scheduler = AdaptiveScheduler([Fake("any", always(0.0), 0.1)], gamma=5)
    scheduler.choose(TokenSequence([0]), 30)
    assert scheduler.choose(TokenSequence([0]), 30)[1] == 5
    assert scheduler.choose(TokenSequence([0]), 3)[1] == 3
    assert scheduler.choose(TokenSequence([0]), 0) == (None, 0)


def test_the_last_draft_may_be_as_long_as_the_rest_of_the_answer():
    """Otherwise a plain step would follow for a single token."""
    scheduler = AdaptiveScheduler([Fake("good", always(1.0), 0.001, relative_cost=0.001, prior=1.0)])
    scheduler.choose(TokenSequence([0]), 12)
    for limit in (1, 7, 11, 13):
        assert scheduler.choose(TokenSequence([0]), limit)[1] == limit
    assert scheduler.choose(TokenSequence([0]), 100)[1] == 24


@pytest.mark.parametrize(("generated", "chosen"), [(20, True), (390, False)])
def test_a_one_off_cost_must_pay_back_within_the_tokens_that_are_left(generated, chosen):
    """Every cycle has emitted one token more than it has accepted."""
    drafter = Fake("large", always(0.9), 0.1, prior=0.9)
    drafter.setup_cost, drafter.draft_kind = (lambda sequence: 20.0), (lambda sequence: None)
    scheduler = AdaptiveScheduler([drafter], may_pause=True, horizon=400)
    simulated(scheduler, generated)
    drafter.draft_kind = lambda sequence: drafter.name
    assert (scheduler.choose(TokenSequence([0]), 100)[0] is drafter) is chosen


def test_the_first_draft_is_not_counted():
    """It may include allocations."""
    good, steps = Fake("good", always(1.0), 0.4, relative_cost=0.4, prior=0.7), StepTimes()
    steps.observe(1, 1.0)
    estimate = DrafterEstimate(good, steps)
    for seconds, expected in ((50.0, 0.4), (1.2, 1.2)):
        estimate.draft_time(Cycle(good, 0, 1, 1, seconds, 1.0))
        assert estimate.token_s == expected
