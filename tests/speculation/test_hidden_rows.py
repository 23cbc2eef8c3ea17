"""The hidden rows that passes leave for drafters: those of transformers, by every path that runs tokens."""

import pytest
import torch

from offload.batching.passes import run_steps
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.tier_settings import TierSettings
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.steps import Step
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU, make_model, tiered_cache

WINDOW, LENGTH, TAPS = 24, 90, (0, 2)
PARENTS = (-1, 0, 0, 1, 1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("tapped"), torch.bfloat16)
    model.tap(TAPS)
    return model


def runner_of(model, chunk=512, **more):
    runner = Runner(model, model.new_cache(400), chunk, **more)
    runner.keep_rows(WINDOW)
    return runner


def kept(runner, length, count=WINDOW):
    """Return the rows of the last tokens of a sequence of `length`."""
    return runner.kept.get(length - count, length)


def fresh_rows(model, tokens, count=WINDOW):
    runner = runner_of(model)
    list(runner.prefill(TokenSequence(tokens)))
    return kept(runner, len(tokens), count)


def test_rows_are_those_that_enter_layers(tmp_path):
    reference = make_hf_model("llama", num_hidden_layers=4)
    reference.save_pretrained(tmp_path)
    model = load_model(FolderCheckpoint(tmp_path), torch.float32, CPU, lambda done, total: None)
    model.tap((3, 1, 4))  # 4 is the output, which is there in any case
    rows = model.forward(torch.tensor(ids(20)), model.new_cache(20))
    with torch.no_grad():
        expected = reference(torch.tensor([ids(20)]), output_hidden_states=True)
    states = expected.hidden_states
    torch.testing.assert_close(rows[:, 64:], torch.cat((states[1][0], states[3][0]), 1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.normed(rows), states[4][0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.logits(rows), expected.logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [7, 16])
def test_rows_of_a_prompt_that_is_run_layer_by_layer(model, chunk):
    cache = tiered_cache(model, TierSettings(mode="stream", page_tokens=512, by_layers=True))
    runner = Runner(model, cache, chunk, by_layers=True)
    runner.keep_rows(WINDOW)
    list(runner.prefill(TokenSequence(ids(LENGTH))))
    assert torch.equal(kept(runner, LENGTH), fresh_rows(model, ids(LENGTH)))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_rows_after_rejections_and_trees_are_those_of_the_tokens_that_stayed(model, is_recorded):
    runner, sequence = runner_of(model), TokenSequence(ids(60))
    if not is_recorded:
        runner.graphs = None
    list(runner.prefill(sequence))
    for turn in range(8):
        new = ids(12, seed=turn)
        if turn % 2:
            runner.rows(sequence, new[:6], PARENTS)
            sequence.extend([new[0], new[2], new[5], new[7]])  # a path, and a token that was not drafted
        else:
            runner.rows(sequence, new[:5])
            sequence.extend([*new[:2], new[7]])
        runner.settle(sequence)
        assert runner.kept.length == len(sequence) - 1
    assert torch.equal(kept(runner, len(sequence) - 1), fresh_rows(model, sequence.tokens[:-1]))


def test_rows_of_several_sequences_in_one_pass(model):
    prompts = [ids(30), ids(40, seed=1)]
    steps = []
    for prompt in prompts:
        cache = model.new_cache(100)
        model.forward(torch.tensor(prompt), cache)
        steps.append(Step(model, cache, torch.tensor(ids(3, seed=2)), len(prompt)))
    for rows, prompt in zip(run_steps(steps), prompts, strict=True):
        assert torch.equal(rows, fresh_rows(model, [*prompt, *ids(3, seed=2)], 3))


def test_a_prompt_whose_last_rows_are_missing_runs_its_last_tokens_again(model):
    runner, sequence = runner_of(model, 16), TokenSequence(ids(LENGTH))
    runner.keep_rows(0)
    list(runner.prefill(sequence))
    runner.keep_rows(WINDOW)
    first = next(event.done for event in runner.prefill(sequence))
    list(runner.prefill(sequence))
    assert first == (LENGTH - WINDOW) // 16 * 16
    assert torch.equal(kept(runner, LENGTH), fresh_rows(model, ids(LENGTH)))
    assert [event.done for event in runner.prefill(sequence)] == [LENGTH - 1, LENGTH]
