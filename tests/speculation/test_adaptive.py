"""The scheduler on simulated times and acceptance rates: never much slower than plain decoding, faster if possible."""

import random

import pytest

from offload.sequence import TokenSequence
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.auto.drafter_estimates import Arm
from offload.speculation.drafters.drafter import Draft
from offload.speculation.passes.estimators import Acceptance, DraftTimes, StepTimes, expected_tokens


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


@pytest.mark.parametrize(("rate", "gamma"), [(0.8, 3), (0.95, 6)])
def test_good_drafts_reach_most_of_what_the_best_fixed_length_would(rate, gamma):
    best = (gamma * 0.05 + step(gamma + 1)) / expected_tokens(rate, gamma)
    for may_pause in (True, False):
        each, _ = simulated(AdaptiveScheduler([Fake("good", always(rate), 0.05)], may_pause=may_pause), 2000)
        assert each < 1.15 * best


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


def test_a_gain_of_plain_steps_alone_is_exactly_nothing():
    drafter, rng = Fake("silent", always(0.0), 0.1), random.Random(0)
    drafter.draft_kind = lambda sequence: None
    scheduler = AdaptiveScheduler([drafter], may_pause=True)
    simulated(scheduler, 30, step=lambda rows: rng.uniform(0.5, 3))
    assert scheduler.gain.speedup == 1


def test_plain_decoding_reports_no_gain_and_neither_does_a_single_step():
    plain = AdaptiveScheduler()
    simulated(plain, 20)
    assert plain.gain is None
    fixed = AdaptiveScheduler([Fake("drafter", always(1.0), 0.05)], gamma=4)
    simulated(fixed, 20)
    fixed.choose(TokenSequence([0]), 1)
    fixed.observe(Cycle(None, 0, 0, 0, 0.0, 1.0))
    assert fixed.gain is None


def test_drafting_resumes_when_acceptance_rises():
    drafter = Fake("changing", lambda position: 0.95 if position > 1000 else 0.0, 0.01)
    scheduler = AdaptiveScheduler([drafter], may_pause=True)
    before, _ = simulated(scheduler, 1000)
    drafter.acceptance = always(0.95)
    after, _ = simulated(scheduler, 1000)
    assert before < 1.05
    assert after < 0.6


def test_the_better_of_two_drafters_is_used():
    scheduler = AdaptiveScheduler([Fake("bad", always(0.1), 0.01), Fake("good", always(0.9), 0.01)], may_pause=True)
    each, _ = simulated(scheduler, 2000)
    assert each < 0.6


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
    assert scheduler.acceptance(drafter, drafter.draft_kind(None)).verified <= 2  # two guesses


def test_a_fixed_draft_length_is_only_cut_by_the_limit():
    scheduler = AdaptiveScheduler([Fake("any", always(0.0), 0.1)], gamma=5)
    scheduler.choose(TokenSequence([0]), 30)
    assert scheduler.choose(TokenSequence([0]), 30)[1] == 5
    assert scheduler.choose(TokenSequence([0]), 3)[1] == 3
    assert scheduler.choose(TokenSequence([0]), 0) == (None, 0)


def test_acceptance_follows_observations_and_decays_to_the_prior():
    rate = Acceptance(prior=0.5)
    assert rate.rate(0) == 0.5
    for cycle in range(50):
        rate.observe(cycle, 4, 4)
    assert rate.rate(50) > 0.9
    for cycle in range(50, 60):
        rate.observe(cycle, 4, 0)
    assert rate.rate(60) < 0.8
    assert abs(rate.rate(2000) - 0.5) < 0.01


def test_tokens_after_a_rejected_one_are_not_verified():
    rate = Acceptance(prior=0.5, weight=0.001)
    rate.observe(0, 8, 3)
    assert abs(rate.rate(0) - 3 / 4) < 0.01


def test_step_times_are_interpolated_and_robust_to_outliers():
    times = StepTimes()
    times.observe(1, 1.0)
    for _ in range(30):
        times.observe(1, 1.0)
        times.observe(5, 2.0)
    assert abs(times.of(3) - 1.5) < 0.1
    assert times.of(9) > times.of(5)
    times.observe(1, 100.0)
    assert times.of(1) < 1.5


def test_the_first_draft_is_not_counted():
    times = DraftTimes()
    times.observe(1, 50.0)
    assert times.of(0.3) == 0.3
    times.observe(4, 2.0)
    assert times.of(0.3) == 0.5


def test_a_draft_that_was_slow_once_is_tried_again():
    """One measurement of twice its time would keep a drafter out for the rest of the answer."""
    good = Fake("good", always(1.0), 0.4, relative_cost=0.4, prior=0.7)
    arm = Arm(good, StepTimes())
    arm.steps.observe(1, 1.0)
    for seconds in (0.4, 1.2):
        arm.times.observe(1, seconds)
    for cycle in range(2, 40):
        arm.candidate("good", TokenSequence([0]), 10, cycle)
    assert 0.75 < arm.token_s < 0.85
    arm.times.observe(1, 0.4)
    arm.times.relax(1.0)
    assert arm.token_s < 0.75  # a higher guess changes nothing


def test_a_shorter_draft_is_preferred_while_little_is_known():
    """A longer one that promises hardly more costs more cycles, if it is rejected, than it would gain."""
    good = Fake("good", always(0.9), 0.1, relative_cost=0.1, prior=0.9)
    arm = Arm(good, StepTimes())
    arm.steps.observe(1, 1.0)
    unsure = arm.candidate("good", TokenSequence([0]), 40, 2)
    for _ in range(20):
        arm.acceptance["good"].observe(2, 10, 9)
    sure = arm.candidate("good", TokenSequence([0]), 40, 2)
    assert abs(unsure.rate - sure.rate) < 0.01
    each, draft = unsure.fastest(unsure.rate)
    best, longer = sure.fastest(sure.rate)
    assert draft.gamma < longer.gamma and best < each < 1.05 * best
    assert unsure.fastest(unsure.rate, 0.1) == (float("inf"), None)


def test_expected_tokens():
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(1, 5) == 6
    assert abs(expected_tokens(0.9, 16) - 8.3) < 0.05  # the figure in the TriForce discussion of limits


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


def test_what_one_drafter_shows_of_the_text_is_expected_of_the_others():
    drafters = [Fake(name, always(0), cost, relative_cost=cost) for name, cost in (("a", 0.1), ("b", 0.1), ("free", 0))]
    scheduler = AdaptiveScheduler(drafters, may_pause=True)
    arms = scheduler._arms

    def believed(arm):
        return arm.candidate("kind", TokenSequence([0]), 8, 1, scheduler._shift(arm)).rate

    before = [believed(arm) for arm in arms]
    arms[0].acceptance["kind"].observe(0, 8, 0)
    after = [believed(arm) for arm in arms]
    assert after[0] < after[1] < before[1] == 0.6
    assert after[2] == before[2]  # lookup runs no model: it does not tell, and is not told


@pytest.mark.parametrize("later", [0.1, 0.6])
def test_later_tokens_of_drafts_that_fade_have_a_rate_of_their_own(later):
    """A head computes the first token from the target's row, and later ones from its own."""
    head = Fake("head", None, 0.02)
    head.fades = True
    arm, rng = Arm(head, StepTimes(), gamma=2), random.Random(0)
    for number in range(300):
        candidate = arm.candidate("head", TokenSequence([0]), 100, number)
        accepted = 0
        while accepted < 2 and rng.random() < (later if accepted else 0.9):
            accepted += 1
        candidate.observe(number, Cycle(head, 0, 2, accepted, 0.04, 1.4))
    (option,) = arm.candidate("head", TokenSequence([0]), 100, 300).options
    assert option.expected(candidate.rate, candidate.rate) == pytest.approx(1 + 0.9 * (1 + later), abs=0.12)
