"""Which steps of a batch's sequences make up a pass, what each is charged, and how all of them end."""

import pytest
import torch

from offload.batching import batch as batches
from offload.batching.batch import Batch
from offload.batching.costs import PassCosts, shares
from offload.batching.lane import Lane
from offload.batching.passes import run_steps
from offload.memory.tree_attention import tree_of
from offload.speculation.passes.steps import Step
from tests.support.models import ids

PROMPT = 9


def step(model, tokens=PROMPT, keys=PROMPT):
    return Step(model, model.new_cache(64), torch.tensor(ids(tokens)), keys)


def lane_of(key, *models):
    """Return a sequence that runs a step of each model."""

    def start(lane):
        for model in models:
            lane.forward(step(model))
        yield lane

    return Lane(key, start)


@pytest.fixture
def passes(endless_engine, monkeypatch):
    """The models of the steps of each pass."""
    found = []

    def noted(steps):
        found.append(["small" if step.model is endless_engine.draft else "large" for step in steps])
        return run_steps(steps)

    monkeypatch.setattr(batches, "run_steps", noted)
    return found


def test_drafts_of_a_small_model_are_run_before_the_pass_of_the_large_one(endless_engine, passes):
    """So that a sequence that has drafted takes part in the pass that another one was ready for before."""
    large, small = endless_engine.model, endless_engine.draft
    assert small.read_cost < large.read_cost
    list(Batch(3).run([lane_of("drafts", small, small, large), lane_of("verifies", large), lane_of("too", large)]))
    assert passes == [["small"], ["small"], ["large"] * 3]


def test_all_sequences_are_closed_though_closing_one_is_interrupted():
    closed = []

    def start(key):
        def events(lane):
            try:
                yield key
                lane.pause()
            finally:
                closed.append(key)
                raise KeyboardInterrupt

        return events

    events = Batch(3).run([Lane(key, start(key)) for key in range(3)])
    assert [next(events)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        events.close()
    assert sorted(closed) == [0, 1, 2]


def test_what_drafts_add_to_a_pass_is_charged_to_those_who_draft(endless_engine):
    costs, one, two = PassCosts(), step(endless_engine.model, tokens=1), step(endless_engine.model, tokens=3)
    assert sum(costs.divide([one, two], 5.0)) == pytest.approx(5.0)
    assert costs.divide([one, one], 2.0) == [1.0, 1.0]
    assert costs.divide([one, two], 5.0) == [1.0, 4.0]
    assert costs.divide([one, two], 1.0) == [0.5, 0.5]  # faster than ever without drafts
    prompt = step(endless_engine.model, tokens=70)
    assert costs.divide([one, prompt], 9.0) == [share * 9.0 for share in shares([one, prompt])]


def test_joint_passes_have_the_bits_of_a_sequence_alone(endless_engine):
    """Passes of all combinations of sequences, with numbers of rows that change, and a tree beside chains."""
    model = endless_engine.model
    together, alone = ([model.new_cache(256) for _ in range(3)] for _ in range(2))
    for turn in range(12):
        chosen = [number for number in range(3) if turn % 7 + 1 & 1 << number]
        tokens = [torch.tensor(ids((5 * turn + 9 * number) % 30 + 1, seed=turn)) for number in chosen]
        tree = tree_of((-1, *range(len(tokens[-1]) - 1))) if turn % 3 == 2 else None
        trees = [None] * (len(chosen) - 1) + [tree]
        wanted = list(zip(chosen, tokens, trees, strict=True))
        found = run_steps([Step(model, together[number], new, 0, its_tree) for number, new, its_tree in wanted])
        for (number, new, its_tree), rows in zip(wanted, found, strict=True):
            assert torch.equal(rows, Step(model, alone[number], new, 0, its_tree).run())
            for cache in (together[number], alone[number]):
                if its_tree is not None:
                    cache.commit([])
