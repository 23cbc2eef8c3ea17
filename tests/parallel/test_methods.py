"""Two and three ranks on gloo generate what a single process generates, with every method."""

from pathlib import Path

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.loading.hub.download import open_checkpoint
from offload.memory.factory import TieredStoreFactory
from offload.parallel import ALONE, split
from offload.settings.config import METHODS
from tests.batching.test_batch import collect
from tests.batching.test_batch import request as batch_request
from tests.support.engine import GREEDY, SMALL
from tests.support.engine import tokens as tokens_of
from tests.support.models import ids
from tests.support.offloading import SmallPages, make_link
from tests.support.rank_pool import CPU, rank_engine
from tests.support.table_models import DRAFTS, hierarchy, p_value

METHODS_AND_DRAFTS = [
    *((method, "lookup") for method in METHODS if method != "naive"),
    ("naive", "model"),
    ("triforce", "model"),
]


_engines = {}


def decode(group, folder, draft, cases, sampling=GREEDY, count=16, **more):
    """Return the tokens of each method, all with one engine, which is kept for the next call."""
    key = folder, draft
    if key not in _engines:
        _engines.clear()
        _engines[key] = rank_engine(group, folder, draft)
    found = []
    for method, drafter in cases:
        wanted = Speculation(method, "a model" if drafter == "model" else drafter, **SMALL | more)
        events = _engines[key].generate(ids(100), sampling, GenerationConfig(max_new_tokens=count, seed=7), wanted)
        found.append([token for event in events if isinstance(event, Tokens) for token in event.ids])
    return found


@pytest.mark.parametrize("name", ["qwen3-uneven"])
def test_every_method_gives_the_single_process_greedy_output(rank_pool, folders, name):
    (plain,) = decode(ALONE, folders[name], folders["draft"], [("ar", "lookup")])
    for found in rank_pool.run(decode, folders[name], folders["draft"], METHODS_AND_DRAFTS):
        for case, tokens in zip(METHODS_AND_DRAFTS, found, strict=True):
            assert tokens == plain, case


def decode_together(group, folder, draft):
    """Return the tokens of sequences that run together, with several methods; two of them begin alike."""
    prompts = [ids(90), ids(300), [*ids(300), *ids(9, 1)], ids(40)]
    methods = [("triforce", "model"), ("auto", "lookup"), ("retrieval", "lookup"), ("ar", "lookup")]
    requests = [batch_request(key, method, prompts[key], 12) for key, method in enumerate(methods)]
    events = collect(rank_engine(group, folder, draft).generate_batch(requests, 3))
    return [tokens_of(events[key]) for key in range(len(requests))]


def test_ranks_run_a_batch_in_step(rank_pool, folders):
    expected = decode_together(ALONE, folders["llama"], folders["draft"])
    for found in rank_pool.run(decode_together, folders["llama"], folders["draft"]):
        assert found == expected


def _sampled(group, folder, draft, cases, sampling, fixed):
    return decode(group, folder, draft, cases, sampling, **fixed)


def test_coupled_sampling_gives_the_single_process_text_with_every_method(rank_pool, folders):
    sampling = Sampling(temperature=0.6, coupled=True)
    (plain,) = decode(ALONE, folders["llama"], folders["draft"], [("ar", "lookup")], sampling)
    for found in rank_pool.run(_sampled, folders["llama"], folders["draft"], METHODS_AND_DRAFTS, sampling, {}):
        assert found == [plain] * len(METHODS_AND_DRAFTS)


def test_every_rank_streams_its_own_heads(rank_pool, folders):
    (plain,) = decode(ALONE, folders["llama"], folders["draft"], [("ar", "lookup")])
    whole = streamed(ALONE, folders["llama"])
    assert whole[0] == plain
    found = rank_pool.run(streamed, folders["llama"])
    assert all(tokens == plain for tokens, _ in found)
    heads = 2 / len(split(open_checkpoint(Path(folders["llama"])).shape, 0, len(found)).kv_heads)
    assert found[0][1] == pytest.approx(whole[1] / heads, rel=0.2)


def streamed(group, folder):
    """Return the tokens, and the bytes copied over this rank's link."""
    opened = open_model(EngineConfig(model=folder, dtype="float32", device="cpu"), group=group)
    model, link = opened.load().model, make_link(bandwidth=1e9)
    stores = TieredStoreFactory(model.operations, CPU, SmallPages("stream", page_tokens=16, resident_layers=1), link)
    one = Engine(model, (), 16, stores=stores)
    events = one.generate(ids(100), GREEDY, GenerationConfig(max_new_tokens=16), Speculation("ar"))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids], link.statistics.bytes


@pytest.mark.long
@pytest.mark.parametrize("rank_pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("method", "draft", "gammas"),
    [
        ("triforce", "good", (2, 3)),
        ("naive", "uniform", (2, 3)),
        ("auto", "good", (None, None)),
    ],
)
def test_ranks_with_different_random_numbers_sample_from_plain_decoding_s_distribution(
    rank_pool, method, draft, gammas
):
    assert draft in DRAFTS
    found = rank_pool.run(table_p_value, method, draft, gammas)
    assert len(set(found)) == 1, "ranks diverged"
    assert found[0] > 1e-3


def table_p_value(group, method, draft, gammas):
    sampling = Sampling(temperature=1, top_p=1)
    return p_value(hierarchy(method, draft, sampling, gammas, group).top, sampling, 1_000)
