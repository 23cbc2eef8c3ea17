"""Constrained answers of a tiny model: one text for all methods, forced tokens without a pass, honest ends."""

import json

import pytest

from offload import Finished, GenerationConfig, Sampling, Speculated, Speculation, Tokens
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import SettingsError
from offload.settings.constraint import Constraint
from tests.support.engine import SMALL, run, tokens
from tests.support.models import ids

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["hero", "other"]}},
    "required": ["name", "kind"],
}
CONSTRAINT = Constraint("json-schema", json.dumps(SCHEMA))
GREEDY = Sampling(temperature=0, constraint=CONSTRAINT)
COUPLED = Sampling(temperature=1, top_p=1, coupled=True, constraint=CONSTRAINT)
METHODS = [
    ("lookup", "lookup", {}),
    ("naive", "model", {}),
    ("triforce", "model", {"tree": "k-ary:2x2"}),
    ("retrieval", "lookup", {"tree": "6"}),
    ("streaming", "lookup", {}),
    ("auto", "model", {}),
]


@pytest.fixture(scope="module")
def make(opened_with_draft):
    """Return what makes an engine with empty caches."""
    loaded = opened_with_draft.load()
    more = {"constraints": opened_with_draft.constraints}
    return lambda: Engine(loaded.model, tuple(loaded.eos_ids), 16, loaded.draft, **more)


@pytest.fixture(scope="module")
def plain(make):
    return {each: tokens(run(make(), ids(60), 60, sampling=each, seed=5)) for each in (GREEDY, COUPLED)}


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_the_text_is_an_instance_of_the_schema(opened_with_draft, plain, sampling):
    found = json.loads(opened_with_draft.tokenizer.decode(plain[sampling]))
    assert found["kind"] in ("hero", "other") and len(found["name"]) <= 6 and len(found) == 2


@pytest.mark.daily("*triforce-model-*2", "*auto*")
@pytest.mark.parametrize(("method", "draft", "trees"), METHODS)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_every_method_gives_plain_decoding_s_text(make, plain, sampling, method, draft, trees):
    assert tokens(run(make(), ids(60), 60, method, draft, sampling, 5, **trees)) == plain[sampling]


def test_a_batch_gives_each_sequence_its_own_masks(make, plain):
    other = Sampling(temperature=0, constraint=Constraint("choices", '["left", "right"]'))
    config, method = GenerationConfig(max_new_tokens=60, seed=5), Speculation("lookup", **SMALL)
    asked = [BatchRequest(key, ids(60), each, config, method) for key, each in enumerate((GREEDY, other, COUPLED))]
    found = {key: [] for key in range(3)}
    for key, event in make().generate_batch(asked, 3):
        found[key] += event.ids if isinstance(event, Tokens) else ()
    assert (found[0], found[2]) == (plain[GREEDY], plain[COUPLED])
    assert found[1] == tokens(run(make(), ids(60), 60, sampling=other))


def test_what_the_schema_dictates_costs_no_pass(make, plain):
    events = run(make(), ids(60), 60, sampling=GREEDY)
    assert tokens(events) == plain[GREEDY]
    last = next(event for event in reversed(events) if isinstance(event, Speculated))
    assert last.levels[0].verifications <= len(plain[GREEDY]) / 2
    assert next(event for event in events if isinstance(event, Tokens)).ids[:2] == (*plain[GREEDY][:2],)


@pytest.mark.parametrize("method", ["naive", "streaming", "triforce"])
def test_a_long_dictated_text_fits_the_small_caches(make, method):
    """Beside their drafts, middle levels have room for fewer tokens than a schema may dictate."""
    text = "a text that nobody but the schema writes, " * 8
    sampling = Sampling(temperature=0, constraint=Constraint("regex", f"(a|b){text}[0-9]{{6}}{text}(c|d)"))
    found = tokens(run(make(), ids(60), 800, method, "model", sampling))
    assert len(found) > 400
    assert found == tokens(run(make(), ids(60), 800, sampling=sampling))


@pytest.mark.parametrize("count", [1, 3, 9])
def test_an_answer_that_reaches_its_limit_says_so(make, plain, count):
    events = run(make(), ids(60), count, sampling=GREEDY)
    assert tokens(events) == plain[GREEDY][:count] and events[-1] == Finished("length")


def test_a_wrong_constraint_is_refused_before_the_prompt_is_read(make):
    wrong = Sampling(constraint=Constraint("json-schema", '{"type": "object", "properties": {"a": {"type": "txt"}}}'))
    events = make().generate(ids(60), wrong, GenerationConfig())
    with pytest.raises(SettingsError, match="at /properties/a"):
        next(events)
