"""Coupled sampling: an interrupted text goes on as it would have, and a replay confirms plain decoding's text."""

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.speculation.levels.coupled_choice import CoupledChoice
from offload.speculation.sampling.noise import Noise
from offload.speculation.sampling.warp import warp
from tests.support.engine import SMALL, fresh, run, tokens
from tests.support.models import ids

SAMPLING = Sampling(temperature=0.6, top_p=0.9, coupled=True)
PENALISED = Sampling(temperature=1, top_k=40, min_p=0.01, repetition_penalty=1.3, dry_multiplier=0.8, coupled=True)
SEED = 11


def test_an_interrupted_text_continues_as_it_would_have(endless_engine):
    engine, prompt = fresh(endless_engine), ids(60)
    whole = tokens(run(fresh(endless_engine), prompt, 40, sampling=SAMPLING, seed=SEED))
    wanted = Speculation("triforce", "a model", **SMALL)
    events, kept = engine.generate(prompt, SAMPLING, GenerationConfig(max_new_tokens=40, seed=SEED), wanted), []
    for event in events:
        kept += event.ids if isinstance(event, Tokens) else ()
        if len(kept) >= 15:
            break
    events.close()
    rest = tokens(run(engine, [*prompt, *kept], 40 - len(kept), "auto", "model", SAMPLING, SEED))
    assert [*kept, *rest] == whole
    assert tokens(run(engine, prompt, 40, "auto", "lookup", SAMPLING, SEED)) == whole


@pytest.mark.parametrize("sampling", [SAMPLING, PENALISED], ids=["t0.6", "penalised"])
def test_a_replay_finds_what_was_changed_and_nothing_else(endless_engine, sampling):
    engine, prompt = fresh(endless_engine), ids(60)
    emitted = tokens(run(engine, prompt, 16, "triforce", "model", sampling, SEED))
    found = engine.replay(prompt, emitted, sampling, seed=SEED)
    assert found.equal
    other = next(token for token in range(200) if token != emitted[12])
    wrong = engine.replay(prompt, [*emitted[:12], other], sampling, seed=SEED)
    assert [(each.position, each.expected) for each in wrong.divergences] == [(12, emitted[12])]
    assert not wrong.lossless
    assert not engine.replay(prompt, emitted[:2], sampling, seed=SEED + 1).lossless
    in_two = engine.replay([*prompt, *emitted[:10]], emitted[10:], sampling, generated=10, seed=SEED)
    assert in_two.equal


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_margin_is_the_smallest_change_that_picks_the_other_token(top_p):
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=0.7, top_p=top_p, coupled=True)
    choice = CoupledChoice(sampling, Noise(5), 9)
    perturbed = Noise(5).scores(warp(logits[None], sampling), [9])[0].log() * sampling.temperature
    first, second = perturbed.topk(2).indices.tolist()
    assert choice.pick(logits) == first
    margin = choice.margin(logits, first, second)
    assert 0 < margin <= float(perturbed[first] - perturbed[second]) * 1.001
    if top_p == 1:
        assert margin == pytest.approx(float(perturbed[first] - perturbed[second]), rel=1e-3)
