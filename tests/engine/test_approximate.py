"""Approximate caches in the engine: any length, one session after another, and what is refused."""

import pytest

from offload import EngineConfig, GenerationConfig, Prefilled, Sampling, Speculation, open_model
from offload.errors import SettingsError
from offload.settings.methods import APPROXIMATIONS
from tests.support.engine import GREEDY, tokens
from tests.support.models import ids

SMALL = {"method": "ar", "sink": 2, "window": 5, "budget": 32, "chunk": 2}


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    engine = open_model(EngineConfig(str(tiny_model_dir), "cpu", "float32", prefill_chunk=16)).load()
    return engine.without_end()


def run(engine, prompt, count=30, **changes):
    wanted = Speculation(**SMALL | changes)
    return list(engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=count), wanted))


@pytest.mark.parametrize("mode", APPROXIMATIONS)
def test_answers_differ_from_exact_ones_unless_the_budget_is_for_everything(engine, mode):
    exact = tokens(run(engine, ids(400)))
    assert tokens(run(engine, ids(400), approximate=mode)) != exact
    assert tokens(run(engine, ids(400), approximate=mode, budget=600)) == exact
    assert tokens(run(engine, ids(400))) == exact  # in a session of its own again


@pytest.mark.parametrize("mode", ["streaming-llm", "h2o"])
def test_prompt_and_answer_may_exceed_the_context(engine, mode):
    context = engine.model.shape.context
    events = run(engine, ids(context - 30), count=60, approximate=mode)
    assert len(tokens(events)) == 60
    assert engine.idle_session.full.cache.capacity == 64
    longer = [*ids(context - 30), *tokens(events), *ids(4, seed=1)]
    events = run(engine, longer, count=2, approximate=mode)  # the conversation goes on
    first = next(event for event in events if isinstance(event, Prefilled))
    assert first.done == len(longer) - 5  # all but the last token of the answer, which was not run yet
    with pytest.raises(SettingsError, match=f"budget of {context:,} tokens, and 128 until the next eviction, exceed"):
        run(engine, ids(20), approximate=mode, budget=context)
    assert len(tokens(run(engine, ids(20), count=3, approximate=mode, budget=context - 128))) == 3


def test_sampling_works_on_them(engine):
    sampling, config = Sampling(temperature=1, coupled=True), GenerationConfig(max_new_tokens=20, seed=3)
    wanted = Speculation(**SMALL, approximate="h2o")
    first, second = (tokens(engine.generate(ids(100), sampling, config, wanted)) for _ in range(2))
    assert first == second
