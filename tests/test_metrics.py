"""The meter's numbers against times worked out by hand."""

import pytest

from offload.events import Finished, Gain, LevelStatistics, Prefilled, Restored, Speculated, Text, Tokens
from offload.metrics import Meter, percentile


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(steps) -> Meter:
    """A meter that has seen each event after its pause in seconds."""
    clock = Clock()
    meter = Meter(1000, clock)
    for pause, event in steps:
        clock.now += pause
        meter.observe(event)
    return meter


def test_plain_decoding():
    steps = [(0, Prefilled(0, 1000)), (2, Prefilled(500, 1000)), (2, Prefilled(1000, 1000)), (0.5, Tokens((1,)))]
    steps += [(pause, Tokens((2,))) for pause in (0.1, 0.1, 0.1, 0.7)] + [(0, Text("x")), (1, Finished("eos"))]
    summary = run(steps).summary("eos", seed=42, method="plain", model="m", peak_memory_bytes=7, settings={"a": 1})
    assert (summary.finish_reason, summary.prompt_tokens, summary.new_tokens) == ("eos", 1000, 5)
    assert summary.prefill_tokens_per_s == pytest.approx(250)
    assert summary.ttft_s == pytest.approx(4.5)
    assert summary.tbt_median_s == pytest.approx(0.1)
    assert summary.tbt_p95_s == pytest.approx(0.1 + 0.6 * 0.85)
    assert summary.tokens_per_s == pytest.approx(4 / 1.0)
    assert (summary.seed, summary.method, summary.model) == (42, "plain", "m")
    assert (summary.peak_memory_bytes, summary.settings) == (7, {"a": 1})


def test_what_is_watched_is_passed_on_and_kept():
    events = [Prefilled(3, 3), Tokens((1, 2)), Text("a"), Tokens(()), Tokens((3,)), Text("bc"), Finished("stop")]
    meter = Meter(3)
    assert list(meter.watch(events)) == events
    assert (meter.ids, meter.new_tokens, meter.text, meter.finish_reason) == ([1, 2, 3], 3, "abc", "stop")


def test_a_run_of_tokens_shares_its_wait():
    meter = run([(1, Tokens((1, 2))), (0.4, Tokens((3, 4, 5, 6))), (0.2, Tokens((7,)))])
    summary = meter.summary("length")
    assert summary.new_tokens == 7
    assert summary.tbt_median_s == pytest.approx(0.1)  # 0.1 four times and 0.2
    assert summary.tokens_per_s == pytest.approx(5 / 0.6)  # the first two came at once, after prefill


def test_what_never_happened_is_none():
    summary = run([]).summary("interrupted")
    assert (summary.ttft_s, summary.tbt_median_s, summary.tokens_per_s, summary.speedup) == (None,) * 4
    assert summary.acceptance == summary.time_share == summary.trees == {}
    one = run([(2, Prefilled(1000, 1000)), (1, Tokens((1,)))]).summary("length")
    assert (one.ttft_s, one.tokens_per_s) == (3, None)


def levels(*rows) -> Speculated:
    return Speculated("auto", "lookup", tuple(LevelStatistics(*row) for row in rows))


def test_one_level_of_speculation():
    plain, drafted = ("none", "full", 2, 0, 0, 0, 0.0, 1.0), ("lookup", "full", 3, 12, 10, 8, 0.5, 2.5)
    summary = run([(1, levels(plain)), (1, Tokens((1,))), (1, levels(plain, drafted)), (1, Tokens((2,) * 12))]).summary(
        "length"
    )
    assert summary.verifications == 5
    assert summary.tokens_per_verification == pytest.approx((8 + 5) / 5)
    assert summary.acceptance == {"lookup -> full": pytest.approx(0.8)}
    assert summary.accepted_of_drafted == {"lookup -> full": pytest.approx(8 / 12)}
    assert summary.time_share == pytest.approx({"draft": 0.5 / 4, "middle": 0, "verify": 3.5 / 4})


def test_the_gain_over_plain_decoding_is_that_of_a_sequence_alone():
    drafted = (
        LevelStatistics("lookup", "full", 3, 12, 10, 8, 0.5, 2.5),
        LevelStatistics("none", "full", 2, verify_s=1.0),
    )
    events = [(1, Speculated("auto", "lookup", drafted, Gain(4.0, 6.0, 0.5))), (1, Tokens((1,) * 12))]
    summary = run(events).summary("length")
    assert (summary.speedup, summary.plain_step_s, summary.cycle_s) == (1.5, 0.5, 1.0)
    assert run(events).summary("length", batch_size=1.5).speedup is None
    assert run([(1, levels(("none", "full", 2, 0, 0, 0, 0.0, 1.0)))]).summary("length").cycle_s is None


def test_the_time_of_a_lower_level_is_not_counted_twice():
    top = ("retrieval", "full", 4, 20, 18, 16, 3.0, 5.0)  # its 3 seconds of drafting are the two rows below
    lower = [("draft", "retrieval", 5, 30, 25, 10, 1.0, 1.5), ("none", "retrieval", 1, 0, 0, 0, 0.0, 0.5)]
    summary = run([(1, levels(top, *lower)), (1, Tokens((1,) * 6))]).summary("stop")
    assert summary.verifications == 4
    assert summary.tokens_per_verification == pytest.approx(6 / 4)  # a stop string has cut off the rest
    assert summary.acceptance == pytest.approx({"retrieval -> full": 16 / 18, "draft -> retrieval": 0.4})
    assert summary.time_share == pytest.approx({"draft": 1 / 8, "middle": 2 / 8, "verify": 5 / 8})


def test_trees_have_means_and_the_acceptance_of_each_child():
    row = LevelStatistics("draft", "full").plus(2, 0, 0.0, 1.0)  # a chain
    row = row.plus(2, 2, 0.0, 1.0, 6, [(3, 1), (1, 0)])
    row = row.plus(4, 0, 0.0, 1.0, 8, [(2, None)])
    summary = run([(1, Speculated("naive", "draft", (row,))), (1, Tokens((1,) * 5))]).summary("length")
    assert summary.trees == {
        "draft -> full": {
            "verifications": 2,
            "nodes": 7,
            "depth": 3,
            "accepted_depth": 1,
            "child_acceptance": [pytest.approx(1 / 3), pytest.approx(1 / 3)],
        }
    }
    assert (row.verifications, row.drafted, row.accepted) == (3, 8, 2)


def test_restored_and_computed_tokens_have_rates_of_their_own():
    events = [
        (0, Prefilled(100, 1000)),  # in memory
        (1, Prefilled(400, 1000, restored=True)),
        (2, Prefilled(600, 1000, restored=True)),
        (0, Restored(500, 9, 2.5)),
        (1, Prefilled(600, 1000)),
        (2, Prefilled(1000, 1000)),
    ]
    meter = run(events[:2])
    assert (meter.restored_tokens, meter.restore_s, meter.cached_tokens) == (300, 1.0, 400)
    assert meter.summary("interrupted").prefill_tokens_per_s is None  # no token was run yet
    summary = run(events).summary("interrupted")
    assert (summary.cached_tokens, summary.restored_tokens, summary.computed_tokens) == (600, 500, 400)
    assert summary.restored_tokens_per_s == pytest.approx(500 / 2.5)
    assert summary.prefill_s == pytest.approx(6)
    assert summary.prefill_tokens_per_s == pytest.approx(400 / 3.5)


def test_restored_tokens_that_have_to_be_run_count_as_computed():
    """With torch, a damaged block drops the others of its chunk."""
    events = [
        (0, Prefilled(0, 1000)),
        (1, Prefilled(512, 1000, restored=True)),
        (1, Prefilled(0, 1000)),
        (1, Prefilled(1000, 1000)),
    ]
    summary = run(events).summary("interrupted")
    assert (summary.restored_tokens, summary.computed_tokens) == (0, 1000)
    assert summary.prefill_tokens_per_s == pytest.approx(1000 / 2)


def test_percentile():
    assert percentile([3], 0.95) == 3
    assert percentile([1, 2], 0.5) == 1.5
    assert percentile(list(range(101)), 0.95) == 95
