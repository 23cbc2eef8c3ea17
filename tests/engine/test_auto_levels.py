"""The drafters that `auto` chooses from, in any order, over one full cache."""

import random

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, open_model
from offload.engine import Engine
from offload.memory.disk_link import DiskLink
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import SimulatedLink
from offload.speculation.auto.adaptive import AdaptiveScheduler
from tests.support.engine import GREEDY, SMALL, tokens
from tests.support.models import ids, make_hf_model, make_tokenizer
from tests.support.offloading import SmallPages

PROMPT, COUNT = ids(400), GenerationConfig(max_new_tokens=48)  # the prompt is long enough for retrieval caches


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Engine:
    path = tmp_path_factory.mktemp("model")
    make_hf_model("llama", intermediate_size=256, max_position_embeddings=1024).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return open_model(EngineConfig(model=str(path), device="cpu"), speculation=auto()).load().without_end()


@pytest.fixture
def engine(loaded, native_operations) -> Engine:
    return loaded


@pytest.fixture
def tiered(engine, tmp_path):
    """Return a function that makes an engine whose KV is streamed: over a link, or from a file on disk."""

    def build(disk) -> Engine:
        model = engine.model
        tiers = SmallPages("stream", 0, page_tokens=64, disk=tmp_path if disk else None)
        link = DiskLink() if disk else SimulatedLink(1e12)
        return Engine(model, (), 512, stores=TieredStoreFactory(model.operations, model.device, tiers, link))

    return build


@pytest.fixture
def random_choices(monkeypatch):
    """Choose drafters and draft lengths at random, so that the levels follow each other in any order."""
    rng, choose = random.Random(0), AdaptiveScheduler.choose

    def choose_any(self, sequence, limit):
        choose(self, sequence, limit)
        kinds = {each.drafter: each.drafter.draft_kind(sequence) for each in self._estimates}
        drafters = [drafter for drafter, kind in kinds.items() if kind is not None]
        self._chosen = None
        if limit < 1 or self._cycle == 1 or not drafters or rng.random() < 0.2:
            return None, 0
        drafter = rng.choice(drafters)
        estimate = next(each for each in self._estimates if each.drafter is drafter)
        candidate = estimate.candidate(kinds[drafter], sequence, min(limit, 8), self._cycle)
        self._chosen = candidate, rng.choice(candidate.options)
        return drafter, self._chosen[1].gamma

    monkeypatch.setattr(AdaptiveScheduler, "choose", choose_any)


def auto(draft="lookup", method="auto"):
    return Speculation(method, draft, **SMALL)


def decode(engine, speculation, sampling=GREEDY, prompt=PROMPT):
    return list(engine.generate(prompt, sampling, COUNT, speculation))


def drafters(events):
    last = [event for event in events if isinstance(event, Speculated)][-1]
    return {row.drafter for row in last.levels if row.verifier == "full"}


def test_levels_in_any_order_emit_the_tokens_of_plain_decoding(engine, random_choices):
    for sampling in (GREEDY, Sampling(temperature=1, coupled=True)):
        events = decode(engine, auto(), sampling)
        assert drafters(events) >= {"retrieval"}
        assert tokens(events) == tokens(decode(engine, auto(method="ar"), sampling))


@pytest.mark.parametrize("disk", [False, True], ids=["link", "disk"])
def test_levels_over_a_link_in_any_order_emit_the_tokens_of_plain_decoding(tiered, random_choices, disk):
    engine = tiered(disk)
    for sampling in (GREEDY, Sampling(temperature=1, coupled=True)):
        events = decode(engine, auto(), sampling)
        assert drafters(events) >= {"retrieval"}
        assert tokens(events) == tokens(decode(engine, auto(method="ar"), sampling))
