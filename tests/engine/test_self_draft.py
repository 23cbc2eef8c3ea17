"""Methods that draft with a quantised copy of the model: the tokens of plain decoding, and the copy that is used."""

import pytest

from offload import EngineConfig, GenerationConfig, Speculated, Speculation, open_model
from offload.engine import Engine
from offload.errors import OutOfMemory, SettingsError
from offload.memory.tier_settings import TierSettings
from tests.support.engine import GREEDY, SMALL, tokens
from tests.support.models import ids, make_hf_model, make_tokenizer

PROMPT, COUNT = ids(100), GenerationConfig(max_new_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_hf_model("llama", intermediate_size=256).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def engine(folder, native_operations):
    return open_model(EngineConfig(model=folder, device="cpu"), speculation=drafting("self")).load().without_end()


def drafting(draft, method="retrieval"):
    return Speculation(method, draft, **SMALL)


def decode(engine, speculation, prompt=PROMPT):
    return list(engine.generate(prompt, GREEDY, COUNT, speculation))


def pairs(events):
    """Return the drafters and verifiers of a run."""
    last = [event for event in events if isinstance(event, Speculated)][-1]
    return {(row.drafter, row.verifier) for row in last.levels}


def test_greedy_is_plain_greedy(engine):
    plain = tokens(decode(engine, Speculation("ar")))
    for method in ("retrieval", "triforce", "streaming", "auto"):
        for draft in ("self:q4", "self:q8", "self"):
            assert tokens(decode(engine, drafting(draft, method))) == plain, (method, draft)


def test_the_retrieval_cache_is_read_with_the_copy(engine):
    assert ("retrieval-q4", "full") in pairs(decode(engine, drafting("self:q4")))
    assert ("streaming-q8", "full") in pairs(decode(engine, drafting("self:q8", "streaming")))
    assert ("retrieval", "full") in pairs(decode(engine, drafting("lookup")))
    assert engine.prepare(PROMPT, COUNT, drafting("lookup")) is None
    assert engine.prepare(PROMPT, COUNT, drafting("self", "ar")) is None


def test_a_level_is_chosen_once(engine):
    first = engine.prepare(PROMPT, COUNT, drafting("self"))
    assert engine.prepare(ids(50, seed=1), COUNT, drafting("self", "auto")) is first
    assert engine.prepare(PROMPT, COUNT, drafting(f"self:{first.level}")) is first


def test_the_expected_cost_of_a_step_counts_the_bits_of_quantised_weights(folder, native_operations):
    def cost(quantize, draft):
        config = EngineConfig(model=folder, device="cpu", quantize=quantize)
        engine = open_model(config, speculation=drafting(draft)).load().without_end()
        decode(engine, drafting(draft))
        return engine.idle_session.runners.kept["middle"][1].relative_cost

    plain = cost(None, "lookup")
    assert cost("q4", "lookup") < plain  # attention, which the retrieval cache saves, is a larger part of the bytes
    assert cost(None, "self:q4") < 0.8 * plain


def test_weights_that_are_quantised_already_draft_themselves(folder, native_operations):
    config = EngineConfig(model=folder, device="cpu", quantize="q4")
    opened = open_model(config, speculation=drafting("self"))
    assert opened.estimate(200).copy == 0
    engine = opened.load().without_end()
    events = decode(engine, drafting("self"))
    assert ("retrieval", "full") in pairs(events)
    assert tokens(events) == tokens(decode(engine, Speculation("ar")))
    with pytest.raises(SettingsError, match="quantised already"):
        open_model(config, speculation=drafting("self:q4"))


@pytest.mark.parametrize(
    ("changes", "reason"), [({"dtype": "float32"}, "dtype is float32"), ({"kernel": "off"}, "kernel is off")]
)
def test_refused_where_no_weights_can_be_quantised(folder, changes, reason):
    config = EngineConfig(model=folder, device="cpu", **changes)
    with pytest.raises(SettingsError, match=f"--draft self:q5 needs .*{reason}") as caught:
        open_model(config, speculation=drafting("self:q5"))
    assert "leave --draft out" in caught.value.hint
    open_model(config, speculation=drafting("self:q5", "lookup"))  # which makes no copy


def test_memory_for_the_copy_is_part_of_the_estimate(folder, native_operations):
    def opened(draft):
        return open_model(EngineConfig(model=folder, device="cpu"), speculation=drafting(draft))

    without, coarse, chosen = (opened(draft).estimate(200) for draft in ("lookup", "self:q4", "self"))
    assert without.copy == 0 < coarse.copy < chosen.copy == opened("self:q8").estimate(200).copy
    assert chosen.total - chosen.copy == without.total
    with pytest.raises(OutOfMemory, match="quantised copy") as caught:
        opened("self").check_fit(200, chosen.total - 1)
    assert "--draft lookup" in caught.value.hint


class KnownCopies:
    """Stands in for QuantizedCopies: q4 changes a tenth of the choices, and a copy is only its level."""

    def changed_by_q4(self, ids):
        return 0.1

    def make(self, level, ids):
        return level


def test_only_keys_and_values_behind_a_link_make_finer_copies_worth_their_bytes(folder, native_operations, tmp_path):
    opened = open_model(EngineConfig(model=folder, device="cpu"))
    layers = opened.shape.layers

    def level(**tiers):
        settings = TierSettings("stream", **tiers) if tiers else None
        loaded = opened.load(tiers=settings)
        engine = Engine(loaded.model, (), 64, stores=loaded.stores, copies=KnownCopies())
        return engine.prepare(PROMPT, GenerationConfig(max_new_tokens=100), Speculation("retrieval", "self"))

    here = level()
    assert level(resident_layers=layers, link_gb_s=1.0) == here  # as where experts alone are in host memory
    assert level(resident_layers=0, link_gb_s=1.0) > here
    assert level(resident_layers=0, disk=tmp_path) > here
