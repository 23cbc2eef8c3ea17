"""Engines with trained heads: every method emits plain decoding's tokens, alone, in batches and after restored prompts."""

import pytest
import torch

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, open_model
from offload.batching.request import BatchRequest
from offload.engine import Engine
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


def drafted(events):
    """Return what the levels over the head have drafted."""
    rows = [row for event in events if isinstance(event, Speculated) for row in event.levels]
    return max((row.drafted for row in rows if row.drafter == "eagle3"), default=0)


@pytest.mark.parametrize("tree", ["chain", "k-ary:2x2", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_and_coupled_tokens_are_those_of_plain_decoding(engine, plain, method, tree):
    for sampling, expected in plain.items():
        more = {} if method == "auto" else {"gamma1": 3, "gamma2": 5}
        events = run(engine, PROMPT, 50, method, "model", sampling=sampling, seed=3, tree=tree, **more)
        assert tokens(events) == expected
        assert method == "auto" or drafted(events) > 0
