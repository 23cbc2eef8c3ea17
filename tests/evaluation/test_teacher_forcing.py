"""Scores of a text against transformers' logits, and what is made of them against its definition."""

import math
from dataclasses import replace

import pytest
import torch

from offload import EngineConfig, open_model
from offload.caches.streaming_llm import StreamingCache
from offload.evaluation.teacher_forcing import (
    mean_divergence,
    perplexity,
    score_text,
    top1_agreement,
)
from offload.events import Prefilled
from offload.speculation.passes.runner import Runner
from tests.support.engine import finished
from tests.support.models import ids, make_hf_model

TEXT, LAST = ids(60), 12


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu", prefill_chunk=16)
    return open_model(config).load()


@pytest.fixture(scope="module")
def expected():
    """The log-probabilities `[LAST, vocab]` that transformers predicts the last tokens with."""
    with torch.inference_mode():
        logits = make_hf_model("llama").eval()(torch.tensor([TEXT])).logits[0]
    return logits[len(TEXT) - LAST - 1 : -1].log_softmax(-1)


def scores(engine, last=LAST, **more):
    return finished(engine.evaluate(TEXT, lambda runner: score_text(runner, TEXT, last, **more)))


def test_scores_are_those_of_transformers(engine, expected):
    found = scores(engine, keep=True)
    torch.testing.assert_close(found.distributions, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.log_probs, expected[range(LAST), TEXT[-LAST:]], atol=1e-4, rtol=1e-4)
    assert found.choices.tolist() == expected.argmax(-1).tolist()
    assert len(found.seconds) == LAST and found.seconds.min() > 0
    assert scores(engine).distributions is None


def test_the_whole_text_before_is_read_with_progress_and_once(engine):
    engine.forget()
    events = engine.evaluate(TEXT, lambda runner: score_text(runner, TEXT, LAST))
    seen = [next(events)]
    finished(seen.append(event) or event for event in events)
    before = len(TEXT) - LAST
    assert [(event.done, event.total) for event in seen] == [(done, before) for done in (0, 16, 32, before)]
    assert next(engine.evaluate(TEXT, lambda runner: score_text(runner, TEXT, LAST))) == Prefilled(before - 1, before)


def test_divergence_is_that_of_the_whole_distributions(engine, expected):
    other = make_hf_model("llama", seed=1)
    with torch.inference_mode():
        logits = other.eval()(torch.tensor([TEXT])).logits[0]
    rows = logits[len(TEXT) - LAST - 1 : -1].log_softmax(-1)
    found = scores(engine, keep=True)
    reference = replace(found, distributions=rows, choices=rows.argmax(-1))
    again = scores(engine, reference=reference)
    kl = torch.nn.functional.kl_div(expected, rows, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(again.divergences, kl, atol=1e-4, rtol=1e-4)
    assert mean_divergence(again) == pytest.approx(float(kl.mean()), rel=1e-4)
    assert top1_agreement(reference, again) == float((rows.argmax(-1) == expected.argmax(-1)).double().mean())
    assert mean_divergence(scores(engine, reference=found)) == pytest.approx(0, abs=1e-6)
    assert mean_divergence(found) is None


def test_tokens_are_run_one_at_a_time_as_in_decoding(engine):
    """A cache of a few tokens then drops what it would drop while decoding, not what a pass of many would."""
    model = engine.model
    cache = StreamingCache(model.shape, model.rope(64), 2, 6, 16, model.dtype, model.device)
    found = finished(score_text(Runner(model, cache, 16), TEXT, LAST))
    assert cache.length == len(TEXT) - 1
    again = StreamingCache(model.shape, model.rope(64), 2, 6, 16, model.dtype, model.device)
    before = torch.tensor(TEXT[: len(TEXT) - LAST]).split(16)
    hidden = [model.forward(part, again) for part in before][-1][-1:]
    for position, token in enumerate(TEXT[-LAST:]):
        row = model.logits(hidden)[0].log_softmax(-1)
        assert float(found.log_probs[position]) == pytest.approx(float(row[token]), abs=1e-5)
        hidden = model.forward(torch.tensor([token]), again)


def test_perplexity():
    log_probs = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.125]).log()
    assert perplexity(log_probs[:2]) == pytest.approx(2)
    assert perplexity(log_probs) == pytest.approx(2 ** ((1 + 1 + 2 + 2 + 3) / 5))
    assert math.isinf(perplexity(torch.tensor([0.0, float("-inf")])))
