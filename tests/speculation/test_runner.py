"""Runners synchronise their caches with the sequence, whatever happened in between."""

from copy import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.caches.factory import selected_cache
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.parallel.shard import Alone
from offload.sequence import TokenSequence
from offload.settings.config import Speculation
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.models import make_hf_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", vocab_size=16).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, torch.device("cpu"), lambda done, total: None)


def test_no_token_is_run_twice(model, monkeypatch):
    runner, sequence, ran = Runner(model, model.new_cache(80)), TokenSequence([1, 2, 3, 4]), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *rest: ran.append(ids.tolist()) or forward(ids, *rest))
    list(runner.prefill(sequence))
    runner.rows(sequence, [5, 6, 7])
    sequence.extend([5, 6, 8])  # two accepted, one replaced
    runner.settle(sequence)
    runner.rows(sequence, [9])
    sequence.extend([9, 1])
    runner.rows(sequence)
    assert ran == [[1, 2, 3, 4], [5, 6, 7], [8, 9], [1]]


def test_a_cached_prompt_runs_its_last_token_only(model, monkeypatch):
    runner, sequence = Runner(model, model.new_cache(80)), TokenSequence([1, 2, 3, 4])
    list(runner.prefill(sequence))
    sequence.extend([5])
    runner.rows(sequence)
    sequence.restart([1, 2, 3, 4])
    assert [event.done for event in runner.prefill(sequence)] == [3, 4]


def test_an_interrupted_comparison_is_made_again(model, monkeypatch):
    """Where the sequence has changed, an interrupt before the comparison must not leave old tokens in the cache."""
    runner, sequence = Runner(model, model.new_cache(64)), TokenSequence([1, 2, 3, 4, 5, 6])
    runner.rows(sequence)
    sequence.truncate(3)
    sequence.extend([9, 9, 9, 8])
    with monkeypatch.context() as patches:
        patches.setattr(
            "offload.speculation.passes.runner.common_prefix", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            runner.rows(sequence)
    fresh = Runner(model, model.new_cache(64))
    torch.testing.assert_close(runner.rows(sequence), fresh.rows(TokenSequence(sequence.tokens)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
    st.integers(0, 6),
    st.lists(st.integers(0, 15), min_size=1, max_size=4),
)
def test_steps_count_as_cached_once_they_are_resolved(model, ran, known, following):
    """Steps that the host never learnt of, as after an interrupt, are dropped."""
    runner, sequence = Runner(model, model.new_cache(80), chunk=4), TokenSequence([1, 2, 3])
    runner.rows(sequence)
    for position, token in enumerate(ran):
        row = runner.forward(torch.tensor([token]))
        fresh = Runner(model, model.new_cache(80)).rows(TokenSequence([1, 2, 3, *ran[: position + 1]]))
        assert torch.allclose(row, fresh, atol=1e-4)
    runner.resolve(ran[:known])
    assert runner.num_cached == 3 + min(known, len(ran))
    sequence.extend(following)
    fresh = Runner(model, model.new_cache(80)).rows(TokenSequence(sequence.tokens))
    assert torch.allclose(runner.rows(sequence), fresh, atol=1e-4)
    assert runner.cache.length == runner.num_cached == len(sequence)


def test_ranks_with_uneven_shares_expect_the_same_costs(model):
    """Otherwise one would draft while another one does not, and both would wait for ever."""

    class RankZeroDecides(Alone):
        def __init__(self):
            self.numbers = None

        def agree(self, numbers):
            self.numbers = self.numbers or list(numbers)
            return self.numbers

    group, found = RankZeroDecides(), []
    for kv_heads, intermediate in ((2, 64), (1, 32)):
        share = copy(model)
        share.shape = replace(model.shape, heads=2 * kv_heads, kv_heads=kv_heads, intermediate=intermediate)
        share.group = group
        full = Runner(share, share.new_cache(400))
        full._cached = [1] * 300
        middle = SelectedRunner(full, selected_cache(full.cache, Speculation("retrieval", budget=32, chunk=4)))
        middle.cache.length = 300
        found.append((middle.relative_cost, middle.setup_cost(TokenSequence([1] * 300))))
    assert found[0] == found[1]
    assert found[0][0] < 1 < found[0][1] + 1
