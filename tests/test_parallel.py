"""Two and three ranks on gloo say what a single process says: models, methods, samples, decisions."""

import math
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from crew import CPU, Crew
from gguf import GGMLQuantizationType
from tables import DRAFTS, hierarchy, p_value
from test_checkpoints import write_gguf
from tiny import make_hf_model, make_tokenizer

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.config import METHODS
from offload.engine import Engine
from offload.errors import RankLost, SettingsError
from offload.loading.hub import open_checkpoint
from offload.loading.same_model import check_same
from offload.loading.weights import load_model
from offload.offloading import SimulatedLink, TieredStoreFactory, TierSettings
from offload.parallel import ALONE, split
from offload.parallel.shard import divide
from offload.sequence import Context
from offload.speculation.runner import Runner

GREEDY = Sampling(temperature=0)
SMALL = {"budget": 32, "chunk": 4, "sink": 4, "window": 16}
MODELS = {
    "llama": ("llama", {}),
    "llama-mha-untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3-uneven": ("qwen3", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
}
WAYS = [*((method, "lookup") for method in METHODS if method != "naive"), ("naive", "model"), ("triforce", "model")]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.long])])
def crew(request):
    crew = Crew(request.param)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every model, and a draft."""
    found = {}
    for name, (family, changes) in {**MODELS, "draft": ("llama", {"num_hidden_layers": 1})}.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_hf_model(family, seed=len(found), **changes).save_pretrained(found[name])
        make_tokenizer().save_pretrained(found[name])
    return {name: str(folder) for name, folder in found.items()}


def ids(count, seed=0):
    return torch.randint(3, 267, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# What a group does


def sums(group):
    """Of numbers whose sum depends on the order, of every size that a pass may have."""
    found = []
    for size in (1, 7, 64, 4096, 100_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(size, generator=torch.Generator().manual_seed(group.rank)).to(dtype) * 10**group.rank
            found.append(group.sum(x))
    return found


def test_all_ranks_get_the_same_bits_of_a_sum(crew):
    first, *others = crew.run(sums)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
    alone = [torch.randn(4096, generator=torch.Generator().manual_seed(rank)) * 10**rank for rank in range(3)]
    torch.testing.assert_close(first[6], sum(alone[: len(others) + 1]))


def words(group):
    rows = torch.full((2, group.rank + 1), float(group.rank))
    widths = [rank + 1 for rank in range(group.size)]
    return group.agree([group.rank + 0.1, 2**53 - group.rank]), group.broadcast(group.rank), group.gather(rows, widths)


def test_rank_0_decides_and_parts_are_put_together(crew):
    for numbers, told, rows in crew.run(words):
        assert numbers == [0.1, 2**53]
        assert told == 0
        assert torch.equal(rows, torch.tensor([[0.0, 1, 1, 2, 2, 2][: rows.shape[1]]] * 2))


def differing(group):
    check_same(group, {"model": "a", "budget": 3})
    try:
        check_same(group, {"model": "a", "budget": 3 + group.rank // (group.size - 1)})
    except SettingsError as error:
        return error.message


def test_who_differs_is_told_on_every_rank(crew):
    messages = crew.run(differing)
    assert len(set(messages)) == 1
    assert f"rank {len(messages) - 1}" in messages[0]
    assert "budget: 3 and 4" in messages[0]


# Shares


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_shares_make_up_the_whole(folders, name, size):
    shape = open_checkpoint(Path(folders[name])).shape
    shares = [split(shape, rank, size, vocab=True) for rank in range(size)]
    assert [head for share in shares for head in share.heads] == list(range(shape.heads))
    assert [column for share in shares for column in share.columns] == list(range(shape.intermediate))
    assert [row for share in shares for row in share.vocab[share.rank]] == list(range(shape.vocab))
    for share in shares:
        assert {head // shape.group for head in share.heads} == set(share.kv_heads)
        assert share.shape.group * share.shape.kv_heads == share.shape.heads


def test_more_ranks_than_heads_are_refused(folders):
    shape = open_checkpoint(Path(folders["llama"])).shape
    with pytest.raises(SettingsError) as caught:
        split(shape, 0, 5)
    assert "--tensor-parallel 4" in caught.value.hint


def test_uneven_runs():
    assert divide(7, 3) == (range(0, 3), range(3, 5), range(5, 7))


# Models


def hidden(group, path, vocab=None):
    """Logits of a prompt in two passes, and the part of the checkpoint's numbers that was read."""
    checkpoint = open_checkpoint(Path(path))
    share = None if group.size == 1 else split(checkpoint.shape, group.rank, group.size, vocab)
    read, tensors = [], checkpoint.tensors

    @contextmanager
    def counted():
        with tensors() as take:
            yield lambda *args: (part := take(*args), read.append(part.numel()))[0]

    checkpoint.tensors = counted
    model = load_model(checkpoint, torch.float32, CPU, lambda *_: None, group=group, share=share)
    runner = Runner(model, model.new_cache(64), 16)
    rows = runner.rows(Context(ids(40)), ids(8, seed=1))
    return model.logits(rows), sum(read) / sum(math.prod(size) for size in checkpoint.sizes().values())


def check_logits(crew, path, vocab=None):
    whole, everything = hidden(ALONE, path)
    assert everything == 1
    found = crew.run(hidden, path, vocab)
    for logits, _ in found:
        assert torch.equal(logits, found[0][0]), "ranks differ"
        torch.testing.assert_close(logits, whole, atol=2e-5, rtol=2e-5)
    return [part for _, part in found]


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_those_of_the_whole_model(crew, folders, name):
    check_logits(crew, folders[name], vocab=False)
    parts = check_logits(crew, folders[name], vocab=True)
    # Nobody reads all of it; norms, and KV heads where there are fewer of them than ranks, are read by several.
    assert max(parts) < 0.7
    assert sum(parts) < 1.2


def test_gguf_is_shared_as_well(crew, tmp_path):
    write_gguf(tmp_path / "model.gguf", make_hf_model("llama"), GGMLQuantizationType.Q8_0)
    check_logits(crew, str(tmp_path / "model.gguf"), vocab=True)


# Sessions


def engine(group, folder, draft, **more):
    config = EngineConfig(model=folder, dtype="float32", device="cpu", prefill_chunk=16, **more)
    opened = open_model(config, speculation=Speculation("naive", draft, **SMALL), group=group)
    loaded = opened.load()
    return Engine(loaded.model, (), 16, loaded._draft)


_kept = {}


def decode(group, folder, draft, ways, sampling=GREEDY, count=24, **more):
    """The tokens of each method, all with one engine, which is kept for the next call."""
    key = folder, draft
    if key not in _kept:
        _kept.clear()
        _kept[key] = engine(group, folder, draft)
    found = []
    for method, drafter in ways:
        wanted = Speculation(method, "a model" if drafter == "model" else drafter, **SMALL | more)
        events = _kept[key].generate(ids(100), sampling, GenerationConfig(max_new_tokens=count, seed=7), wanted)
        found.append([token for event in events if isinstance(event, Tokens) for token in event.ids])
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-uneven"])
def test_every_method_gives_the_single_process_greedy_output(crew, folders, name):
    (plain,) = decode(ALONE, folders[name], folders["draft"], [("ar", "lookup")])
    for found in crew.run(decode, folders[name], folders["draft"], WAYS):
        for way, tokens in zip(WAYS, found, strict=True):
            assert tokens == plain, way


def test_the_same_seed_gives_the_single_process_sample(crew, folders):
    sampling, fixed = Sampling(temperature=0.8, top_p=0.95), {"gamma1": 2, "gamma2": 5}
    ways = [way for way in WAYS if way[0] != "auto"]  # its choices hang on the clock
    expected = decode(ALONE, folders["llama"], folders["draft"], ways, sampling, **fixed)
    for found in crew.run(_sampled, folders["llama"], folders["draft"], ways, sampling, fixed):
        assert found == expected


def _sampled(group, folder, draft, ways, sampling, fixed):
    return decode(group, folder, draft, ways, sampling, **fixed)


def test_every_rank_streams_its_own_heads(crew, folders):
    (plain,) = decode(ALONE, folders["llama"], folders["draft"], [("ar", "lookup")])
    whole = streamed(ALONE, folders["llama"])
    assert whole[0] == plain
    found = crew.run(streamed, folders["llama"])
    assert all(tokens == plain for tokens, _ in found)
    heads = 2 / len(split(open_checkpoint(Path(folders["llama"])).shape, 0, len(found)).kv_heads)
    assert found[0][1] == pytest.approx(whole[1] / heads, rel=0.2)


def streamed(group, folder):
    """The tokens, and the bytes that came over this rank's link."""
    opened = open_model(EngineConfig(model=folder, dtype="float32", device="cpu"), group=group)
    model, link = opened.load().model, SimulatedLink(1e9, poison=True)
    stores = TieredStoreFactory(model.operations, CPU, TierSettings("stream", page_tokens=16, resident_layers=1), link)
    one = Engine(model, (), 16, stores=stores)
    events = one.generate(ids(100), GREEDY, GenerationConfig(max_new_tokens=24), Speculation("ar"))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids], link.statistics.bytes


@pytest.mark.slow
@pytest.mark.parametrize("crew", [2], indirect=True)
def test_the_embedded_model_with_three_kv_heads(crew, embedded_model_dir):
    text = (Path(__file__).parent / "data" / "pride-and-prejudice-opening.txt").read_text("utf-8")[:1500]
    ways = [("ar", "lookup"), ("lookup", "lookup"), ("triforce", "lookup"), ("auto", "lookup")]
    plain = book(ALONE, str(embedded_model_dir), text, ways[:1])[0]
    for found in crew.run(book, str(embedded_model_dir), text, ways):
        assert found == [plain] * len(ways)


def book(group, folder, text, ways):
    opened = open_model(EngineConfig(model=folder, dtype="float32", device="cpu"), group=group)
    one, prompt, found = opened.load(), opened.tokenizer.encode(text, special_tokens=True), []
    for method, draft in ways:
        wanted = Speculation(method, draft, budget=128, chunk=16)
        events = one.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=24), wanted)
        found.append([token for event in events if isinstance(event, Tokens) for token in event.ids])
    return found


# Decisions


@pytest.mark.slow
@pytest.mark.parametrize("crew", [2], indirect=True)
@pytest.mark.parametrize(
    ("method", "draft", "gammas"),
    [
        pytest.param("triforce", "good", (2, 3), marks=pytest.mark.long),
        pytest.param("naive", "uniform", (2, 3), marks=pytest.mark.long),
        ("auto", "good", (None, None)),
    ],
)
def test_tokens_are_distributed_as_plain_decoding_has_it_on_ranks_that_draw_other_numbers(crew, method, draft, gammas):
    assert draft in DRAFTS
    found = crew.run(table_p_value, method, draft, gammas)
    assert len(set(found)) == 1, "ranks went apart"
    assert found[0] > 1e-3


def table_p_value(group, method, draft, gammas):
    sampling = Sampling(temperature=1, top_p=1)
    return p_value(hierarchy(method, draft, sampling, gammas, group).top, sampling, 3_000)


# Faults


@pytest.mark.parametrize("phase", ["prefill", "draft", "verification"])
def test_the_end_of_a_rank_ends_the_others_at_once(folders, phase):
    crew = Crew(2)
    took, _ = crew.run(until_lost, folders["llama"], folders["draft"], phase)
    crew.close()
    assert took < 10


def until_lost(group, folder, draft, phase):
    """Rank 1 is killed in a phase of its work; rank 0 gives the seconds between its last event and the error."""
    one = engine(group, folder, draft)
    wanted, last = Speculation("triforce", "a model", gamma1=2, gamma2=4, **SMALL), time.perf_counter()
    events = one.generate(ids(100), GREEDY, GenerationConfig(max_new_tokens=200), wanted)
    if group.rank == 1:
        die_in(phase, one)
    try:
        for _ in events:
            last = time.perf_counter()
    except RankLost:
        return time.perf_counter() - last
    raise AssertionError("nothing was lost")


def die_in(phase, one):
    """From now on this process is killed as it does something for the fifth time."""
    model = one._draft if phase == "draft" else one.model
    forward, calls = model.forward, []

    def deadly(ids, cache):
        calls.append(len(ids))
        if len(calls) == 5 + 10 * (phase == "verification"):  # a prompt of 100 tokens is read in seven passes
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(ids, cache)

    model.forward = deadly
