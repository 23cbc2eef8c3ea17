"""Engines with trained heads emit plain decoding's tokens: by every method, in batches, and after restored prompts."""

import json

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, open_model
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.events import Restored
from offload.kernels.ops import TorchOperations
from offload.loading.heads import checked_drafter
from offload.settings.constraint import Constraint
from offload.speculation.drafters.model_drafter import HeadDrafter
from tests.support.engine import GREEDY, SMALL, run, tokens
from tests.support.heads import LAYERS, save_eagle3
from tests.support.models import ids, make_hf_model, make_tokenizer
from tests.support.prompt_cache import engine_on

COUPLED = Sampling(temperature=1, coupled=True)
METHODS = ["naive", "triforce", "streaming", "auto"]
PROMPT = ids(100)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    make_hf_model("llama", num_hidden_layers=LAYERS).save_pretrained(target)
    make_tokenizer().save_pretrained(target)
    return target, save_eagle3(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def engine(folders):
    target, head = folders
    opened = open_model(
        EngineConfig(str(target), "cpu", "float32", prefill_chunk=16), speculation=Speculation("naive", str(head))
    )
    return opened.load().without_end()


@pytest.fixture(scope="module")
def plain(engine):
    return {sampling: tokens(run(engine, PROMPT, 50, sampling=sampling, seed=3)) for sampling in (GREEDY, COUPLED)}


def speculated(events):
    return [event for event in events if isinstance(event, Speculated)]


def drafted(events):
    """Return what the levels over the head have drafted."""
    return max(
        (row.drafted for event in speculated(events) for row in event.levels if row.drafter == "eagle3"), default=0
    )


@pytest.mark.daily("naive-*", "auto-*", "triforce-k-ary*", "streaming-auto")
@pytest.mark.parametrize("tree", ["chain", "k-ary:2x2", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_and_coupled_tokens_are_those_of_plain_decoding(engine, plain, method, tree):
    for sampling, expected in plain.items():
        more = {} if method == "auto" else {"gamma1": 3, "gamma2": 5}
        events = run(engine, PROMPT, 50, method, "model", sampling=sampling, seed=3, tree=tree, **more)
        assert tokens(events) == expected
        assert method == "auto" or drafted(events) > 0


@pytest.mark.parametrize(("method", "tree"), [("naive", "chain"), ("triforce", "k-ary:2x2")])
def test_tokens_that_a_schema_dictates_do_not_confuse_a_head(engine, method, tree):
    schema = {"properties": {name: {"type": "string", "maxLength": 4} for name in ("narrator", "place")}}
    schema |= {"type": "object", "required": ["narrator", "place"]}
    sampling = Sampling(temperature=0, constraint=Constraint("json-schema", json.dumps(schema)))
    events = run(engine, PROMPT, 40, method, "model", sampling=sampling, tree=tree, gamma1=3, gamma2=5)
    assert tokens(events) == tokens(run(engine, PROMPT, 40, sampling=sampling)) and drafted(events) > 0
    assert speculated(events)[-1].masks.forced > 10


@pytest.fixture
def drafts(monkeypatch):
    """The tokens of every draft of a head."""
    found, propose = [], HeadDrafter.propose

    def noted(self, *request):
        draft = propose(self, *request)
        found.append(draft.tokens)
        return draft

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    return found


def test_a_restored_prompt_has_the_drafts_of_a_fresh_one(folders, tmp_path, drafts):
    def answered(home):
        restoring = engine_on(folders[0], home)
        model = restoring.model
        head = checked_drafter(folders[1], model.shape).load(model, TorchOperations())
        model.tap(head.own.taps)
        events = run(Engine(model, (), 64, head, prompts=restoring.prompts), ids(900), 12, "naive", "model", gamma2=3)
        found = list(drafts), any(isinstance(event, Restored) for event in events)
        drafts.clear()
        return found

    fresh, _ = answered(None)
    assert answered(tmp_path / "home") == (fresh, False)
    assert answered(tmp_path / "home") == (fresh, True)
    assert len(fresh) > 3


def test_sequences_of_a_batch_draft_as_they_do_alone(engine, drafts):
    settings = Speculation("naive", "a head", gamma2=3, **SMALL)
    config = GenerationConfig(max_new_tokens=20)
    prompts = {"first": ids(400), "same beginning": [*ids(300), *ids(30, seed=1)], "other": ids(50, seed=2)}
    alone, expected = {}, {}
    for key, prompt in prompts.items():
        engine.release()
        expected[key] = tokens(list(engine.generate(prompt, GREEDY, config, settings)))
        alone[key] = sorted(drafts)
        drafts.clear()
    requests = [BatchRequest(key, prompt, GREEDY, config, settings) for key, prompt in prompts.items()]
    events = list(engine.generate_batch(requests, 3))
    assert {key: tokens([each for name, each in events if name == key]) for key in prompts} == expected
    assert sorted(drafts) == sorted(draft for each in alone.values() for draft in each)
