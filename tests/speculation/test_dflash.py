"""DFlash drafters: their forward pass against plain torch, their caches after rejections, and what they emit."""

import json

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import CheckpointError, SettingsError, UnsupportedModel
from offload.loading.drafters import checked_drafter, is_drafter_folder
from offload.model.dflash import DFlash
from offload.sequence import TokenSequence
from offload.speculation.auto.adaptive import AdaptiveScheduler
from offload.speculation.drafters.dflash import BlockPasses, DFlashDrafter, DFlashRunner
from offload.speculation.drafters.drafter import ModelDrafter
from offload.speculation.levels.level import Level, Verifier
from offload.speculation.passes.runner import Runner
from offload.speculation.sampling.warp import Sampler
from offload.speculation.trees.drafted_trees import FixedTrees
from offload.speculation.trees.tree import DraftedTree, k_ary
from tests.support.dflash import BLOCK, MASK, DFlashReference, save_dflash
from tests.support.engine import SMALL, run, tokens
from tests.support.heads import LAYERS, VOCAB
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU
from tests.support.table_models import DRAFTS, TARGET, TableRunner, p_value, table
from tests.support.table_models import VOCAB as TABLE_VOCAB

DEPTH = 4
SETTINGS = Speculation("naive", "a drafter", window=200)  # for all slots of these tests
GREEDY, T1 = Sampling(temperature=0), Sampling(temperature=1, top_p=1)
COUPLED = Sampling(temperature=1, top_k=40, repetition_penalty=1.3, coupled=True)
CASES = {
    "full": {},
    "dspark": {"markov": 8},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 300},
}


@pytest.fixture(scope="module")
def reference():
    return make_hf_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_dflash(tmp_path_factory.mktemp(name), **changes) for name, changes in CASES.items()}


def load(folder, target):
    drafter = checked_drafter(folder, target.shape).load(target, target.operations)
    target.tap(drafter.own.taps)
    return drafter


def new_runner(target, drafter, sequence):
    """Return a drafter's runner, and that of the target, which has read all but the last token of a sequence."""
    full = Runner(target, target.new_cache(400))
    drafting = DFlashRunner(drafter, SETTINGS, [full])
    full.keep_rows(drafting.reach)
    last = sequence.tokens[-1]
    sequence.truncate(len(sequence) - 1)
    list(full.prefill(sequence))
    sequence.extend([last])
    return drafting, full


@pytest.mark.parametrize("case", ["full", "sliding"])
def test_logits_are_those_of_plain_torch(reference, target, folders, case):
    sequence = TokenSequence(ids(50))
    expected = DFlashReference(folders[case], reference).logits(sequence.tokens, DEPTH)
    runner, _ = new_runner(target, load(folders[case], target), sequence)
    torch.testing.assert_close(runner.logits(runner.slots(sequence, DEPTH)), expected, rtol=1e-3, atol=1e-3)


def test_each_row_of_dspark_follows_the_token_before(reference, target, folders):
    """Of a chain, and of the nodes of a tree."""
    sequence = TokenSequence(ids(50))
    runner, _ = new_runner(target, load(folders["dspark"], target), sequence)
    drafter, expected = DFlashDrafter(runner, Sampler(T1, 0, VOCAB, CPU), target.group), {}
    for tree in (None, DraftedTree(k_ary((2, 2, 1)))):
        draft = drafter.propose(sequence, 3, tree)
        for node in (0, 1) if tree is None else (2, 3, 4, 5):
            path = [draft.tokens[each] for each in draft.path(node)]
            logits = DFlashReference(folders["dspark"], reference).logits(sequence.tokens, 3, path)
            torch.testing.assert_close(draft.rows[node + 1], logits[len(path)].softmax(-1), rtol=1e-3, atol=1e-5)
            expected[node] = logits[0].softmax(-1)
        torch.testing.assert_close(draft.rows[0], expected[node], rtol=1e-3, atol=1e-5)
    assert len(drafter.propose(sequence, 20).tokens) == BLOCK


def test_a_draft_takes_one_pass_and_no_more_than_a_block(target, folders, monkeypatch):
    sequence, passes, block = TokenSequence(ids(50)), [], DFlash.block
    runner, _ = new_runner(target, load(folders["full"], target), sequence)
    monkeypatch.setattr(DFlash, "block", lambda self, x, cache: passes.append(x.tolist()) or block(self, x, cache))
    drafter = DFlashDrafter(runner, Sampler(T1, 0, VOCAB, CPU), target.group)
    assert len(drafter.propose(sequence, 20).tokens) == BLOCK - 1
    assert drafter.propose(sequence, 20, DraftedTree((-1, 0, 1, 2, 3, 4, 5, 6))).depth == BLOCK - 1
    assert passes == [[sequence.tokens[-1], *[MASK] * (BLOCK - 1)]] * 2


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("tree", [None, DraftedTree(k_ary((2, 2, 1)))], ids=["chain", "tree"])
def test_after_any_rejection_the_cache_is_that_of_a_fresh_run(target, folders, accepted, tree):
    drafter, sequence = load(folders["full"], target), TokenSequence(ids(40))
    runner, full = new_runner(target, drafter, sequence)
    drafting = DFlashDrafter(runner, Sampler(GREEDY, 0, VOCAB, CPU), target.group)
    draft = drafting.propose(sequence, DEPTH, tree)
    full.rows(sequence, draft.tokens) if tree is None else full.tree_rows(sequence, draft.tokens, draft.parents)
    path = range(accepted) if tree is None else (0, 2, 6)[:accepted]
    sequence.extend([*(draft.tokens[node] for node in path), 266])
    full.settle(sequence)
    found, again = runner.slots(sequence, DEPTH).clone(), TokenSequence(sequence.tokens)
    fresh, _ = new_runner(target, drafter, again)
    torch.testing.assert_close(found, fresh.slots(again, DEPTH), rtol=1e-3, atol=1e-3)
    assert runner.cache.length == len(sequence) - 1


class TableDrafter(ModelDrafter):
    """DSpark over a table: each of its slots by itself, and a bias by the token before."""

    in_one_pass = True
    passes = BlockPasses


@pytest.mark.daily("t1-chain", "t0.7-tree")
@pytest.mark.parametrize("tree", [None, k_ary((2, 2))], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", [T1, Sampling(temperature=0.7, top_p=0.9)], ids=["t1", "t0.7"])
def test_first_tokens_drafted_by_dspark_are_distributed_as_in_plain_decoding(sampling, tree):
    sampler, bias = Sampler(sampling, 0, TABLE_VOCAB, CPU), table(7)[0]
    runner = TableRunner(DRAFTS["good"], mask_token=2)
    runner.model.biased = lambda logits, ids: logits + bias[ids]
    trees = None if tree is None else (lambda in_one_pass: FixedTrees(DraftedTree(tree)))
    scheduler = AdaptiveScheduler([TableDrafter(runner, sampler)], gamma=3, trees=trees)
    level = Level("target", Verifier("full", TableRunner(TARGET), sampler), scheduler, sampler.generator)
    assert p_value(level, sampling, 250) > 1e-3


@pytest.fixture(scope="module")
def engines(targets, folders):
    """Those on torch have a DSpark drafter, those on the native kernel a DFlash one."""
    kinds = {"torch": "dspark", "native": "full"}
    return {name: Engine(target, (), 16, load(folders[kinds[name]], target)) for name, target in targets.items()}


@pytest.mark.parametrize(
    ("kernel", "method", "tree"),
    [
        ("torch", "naive", "chain"),
        ("torch", "naive", "k-ary:2x2"),
        ("native", "naive", "k-ary:2x2"),
        ("torch", "triforce", "chain"),
        ("native", "triforce", "auto"),
        ("native", "auto", "auto"),
    ],
)
def test_text_is_plain_decoding_s(engines, kernel, method, tree):
    engine = engines.get(kernel) or pytest.skip("there is no native kernel here")
    for sampling in (GREEDY, COUPLED):
        expected = tokens(run(Engine(engine.model, (), 16), ids(90), 14, sampling=sampling, seed=3))
        for end in (7, 14):
            assert tokens(run(engine, ids(90), end, method, "model", sampling, 3, tree=tree)) == expected[:end]


def test_sequences_of_a_batch_have_the_text_that_they_have_alone(engines):
    engine = engines.get("native") or pytest.skip("there is no native kernel here")
    config, settings = GenerationConfig(max_new_tokens=10), Speculation("naive", "a model", **SMALL)
    requests = [BatchRequest(seed, ids(40 + seed, seed), GREEDY, config, settings) for seed in range(3)]
    found = {request.key: [] for request in requests}
    for key, event in engine.generate_batch(requests, 3):
        found[key] += event.ids if isinstance(event, Tokens) else ()
    for request in requests:
        assert found[request.key] == tokens(run(Engine(engine.model, (), 16), request.ids, 10))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": 32}, SettingsError, "hidden size of 32"),
        ({"vocab_size": 300}, SettingsError, "vocabulary of 300"),
        ({"num_target_layers": 9}, SettingsError, "number of layers of 9"),
        ({"dflash_config": {"target_layer_ids": [0, 7], "mask_token_id": 3}}, CheckpointError, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 300}}, CheckpointError, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 3}}, CheckpointError, r"fc\.weight is \[64, 128"),
        ({"selector_rank": 8}, UnsupportedModel, "DFlash2"),
        ({"markov": 8, "markov_head_type": "gated"}, UnsupportedModel, "markov_head_type 'gated'"),
    ],
)
def test_wrong_folders_are_refused(targets, tmp_path, changes, error, message):
    folder = save_dflash(tmp_path / "drafter", **changes)
    assert is_drafter_folder(folder)
    with pytest.raises(error, match=message):
        checked_drafter(folder, targets["torch"].shape)


def test_its_dimensions_are_those_of_its_weights(targets, folders):
    checkpoint = checked_drafter(folders["full"], targets["torch"].shape)
    assert checkpoint.dimensions.in_one_pass and checkpoint.head.block == BLOCK
    assert json.loads((folders["full"] / "config.json").read_text())["block_size"] == BLOCK
