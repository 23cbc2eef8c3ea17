"""Draft models that draft all tokens in one pass (PARD): against transformers, and lossless as every drafter is."""

from copy import copy
from dataclasses import replace

import pytest
import torch

from offload import Sampling, Speculation
from offload.caches.factory import draft_cache
from offload.engine import Engine
from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.planning.passes import Passes
from offload.planning.plan import make_plan
from offload.sequence import TokenSequence
from offload.settings.tree_settings import TreeShape
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.drafters.drafter import DraftRunner, ParallelDrafter
from offload.speculation.sampling.warp import Sampler
from offload.speculation.trees.best_size import fastest_tree, sized_tree
from offload.speculation.trees.tree import DraftedTree, tree_of
from tests.support.engine import run, tokens
from tests.support.fake_models import fake_shape
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU
from tests.support.planning import request
from tests.support.table_models import hierarchy, p_value

MASK, DEPTH, VOCAB = 7, 4, 40
GREEDY, T1 = Sampling(temperature=0), Sampling(temperature=1, top_p=1)
PENALISED = Sampling(temperature=1, top_k=20, repetition_penalty=1.3, no_repeat_ngram=1, coupled=True)
TREE = DraftedTree((-1, -1, 0, 0, 1, 2, 4))


@pytest.fixture(scope="module")
def reference():
    return make_hf_model("llama", vocab_size=VOCAB, pard_token=MASK)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pard")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None)


def new_drafter(model, sampling=GREEDY):
    settings = Speculation("naive", "a model", sink=3, window=100)  # sees all tokens
    return ParallelDrafter(DraftRunner(model, draft_cache(model, settings), 64), Sampler(sampling, 0, VOCAB, CPU))


def text(count=50):
    return TokenSequence([token % VOCAB for token in ids(count)])


@torch.no_grad()
def expected_logits(reference, prompt):
    """The last K logits of one pass with K - 1 mask tokens behind the text, as PARD's own inference has them."""
    return reference(torch.tensor([[*prompt, *[MASK] * (DEPTH - 1)]])).logits[0, -DEPTH:]


def test_a_draft_has_the_rows_of_transformers(model, reference):
    logits = expected_logits(reference, text().tokens)
    assert new_drafter(model).propose(text(), DEPTH).tokens == logits.argmax(-1).tolist()
    rows = new_drafter(model, T1).propose(text(), DEPTH).rows
    torch.testing.assert_close(rows, logits.softmax(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_it_takes_one_pass_and_one_product_with_the_head(model, monkeypatch, tree):
    """The next pass runs the new tokens and the masks, and none of the earlier tokens."""
    drafter, sequence, passes, heads = new_drafter(model, T1), text(), [], []
    forward, logits = Model.forward, Model.logits
    monkeypatch.setattr(Model, "forward", lambda self, x, cache: passes.append(x.tolist()) or forward(self, x, cache))
    monkeypatch.setattr(Model, "logits", lambda self, hidden: heads.append(len(hidden)) or logits(self, hidden))
    draft = drafter.propose(sequence, DEPTH, tree)
    masks = [MASK] * (draft.depth - 1)
    assert passes == [[*sequence.tokens, *masks]] and heads == [draft.depth]
    sequence.extend([draft.tokens[0], 1])
    drafter.propose(sequence, DEPTH, tree)
    assert passes[1:] == [[draft.tokens[0], 1, *masks]]


@pytest.mark.parametrize("sampling", [T1, GREEDY, replace(T1, coupled=True)], ids=["drawn", "greedy", "coupled"])
def test_the_children_of_a_tree_are_drawn_from_their_depth(model, reference, sampling):
    logits = expected_logits(reference, text().tokens)
    draft = new_drafter(model, sampling).propose(text(), DEPTH, TREE)
    tree = tree_of(draft.parents)
    if draft.rows is not None:
        for node in (-1, *(node for node in range(len(tree)) if tree.children[node + 1])):
            depth = 0 if node < 0 else tree.depths[node] + 1
            torch.testing.assert_close(draft.rows[node + 1], logits[depth].softmax(-1), rtol=1e-3, atol=1e-4)
    if sampling is GREEDY:
        assert [draft.tokens[node] for node in range(2)] == logits[0].topk(2).indices.tolist()
        assert [draft.tokens[node] for node in (2, 3)] == logits[1].topk(2).indices.tolist()


@pytest.mark.parametrize("following", [[1], [MASK, 3], [MASK] * 3, [5, MASK, MASK, 2]])
def test_after_any_rejection_the_cache_is_that_of_a_fresh_run(model, following):
    """A mask that the text really has may stay: it has the same keys."""
    drafter, sequence = new_drafter(model), text()
    for count in (DEPTH, 1):
        drafter.propose(sequence, count)
        sequence.extend(following)
    rows, fresh = (each._runner.rows(sequence) for each in (drafter, new_drafter(model)))
    torch.testing.assert_close(rows, fresh, rtol=1e-4, atol=1e-4)
    assert drafter._runner.cache.length == drafter._runner.num_cached == len(sequence)


def test_penalties_see_the_tokens_drawn_before(model):
    for tree in (None, DraftedTree((-1, 0, 1, 2))):
        draft = new_drafter(model, replace(PENALISED, temperature=0)).propose(text(8), DEPTH, tree)
        assert len({*draft.tokens}) == DEPTH


@pytest.fixture
def engine(endless_engine):
    """The engine with its draft model as one that drafts in one pass."""
    draft = copy(endless_engine.draft)
    draft.shape = replace(draft.shape, mask_token=MASK)
    return Engine(endless_engine.model, (), 16, draft)


@pytest.mark.parametrize(
    ("method", "tree"),
    [("naive", "chain"), ("naive", "k-ary:2x2x1"), ("triforce", "chain"), ("auto", "chain"), ("auto", "auto")],
)
def test_text_is_plain_decoding_s(engine, method, tree):
    for sampling in (GREEDY, PENALISED):
        expected = tokens(run(engine, ids(60), 16, sampling=sampling, seed=3))
        for end in (8, 16):  # the second request goes on with the caches of the first
            found = tokens(run(engine, ids(60), end, method, "model", sampling, 3, tree=tree))
            assert found == expected[:end]


@pytest.mark.daily("naive-*-chain-*")
@pytest.mark.parametrize("runs", [300, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("tree", ["chain", "k-ary:2x2"])
@pytest.mark.parametrize("sampling", [T1, Sampling(temperature=0.7, top_p=0.9)], ids=["t1", "t0.7"])
@pytest.mark.parametrize("method", ["naive", "triforce"])
def test_the_first_tokens_are_distributed_as_in_plain_decoding(method, sampling, tree, runs):
    top = hierarchy(method, "good", sampling, (3, 3), mask_token=2, tree=tree).top
    assert p_value(top, sampling, runs) > 1e-3


class Fake:
    """A drafter of which a draft of any length takes 2 of a plain step's 10 ms."""

    name, branches, setups, in_one_pass, relative_cost, longest = "draft", True, 0, True, 0.2, 64

    def draft_kind(self, sequence):
        return True

    def prior(self, kind):
        return 0.8

    def setup_cost(self, sequence):
        return 0.0


def test_the_scheduler_knows_that_long_drafts_cost_as_much_as_short_ones():
    """Whereas a drafter of a pass a token would draft 3 tokens: its eighth one costs more than it brings."""
    lengths = {}
    for parallel in (True, False):
        drafter = Fake()
        drafter.in_one_pass, lengths[parallel] = parallel, []
        scheduler = AdaptiveScheduler([drafter])
        for cycle in range(40):
            chosen, gamma = scheduler.choose(TokenSequence([0]), 1000)
            accepted = gamma if cycle % 2 else min(gamma, 4)
            draft_s = 0.002 * (1 if parallel else gamma)
            scheduler.observe(Cycle(chosen, 0, gamma, accepted, draft_s, 0.01 + 0.0002 * gamma))
            lengths[parallel].append(gamma)
    assert min(lengths[True][20:]) > max(lengths[False][20:])


def test_a_tree_of_one_pass_is_charged_for_one():
    rates, verify_s = (0.6, 0.12, 0.06), lambda rows: 1.0 + 0.01 * rows
    deep, flat = (fastest_tree(rates, lambda rows: 0.3, verify_s, 64, 16, in_one_pass=each) for each in (True, False))
    assert tree_of(deep.parents).depth > tree_of(flat.parents).depth
    for shape in ("k-ary:2x1x1", "8"):
        tree = sized_tree(TreeShape.parse(shape), rates, lambda rows: 0.3 + rows, verify_s, in_one_pass=True)
        assert tree.seconds == pytest.approx(0.3 + tree_of(tree.parents).depth + verify_s(len(tree.parents) + 1))


def test_a_plan_knows_that_a_draft_takes_one_pass():
    shape, found = fake_shape("8B", 6), {}
    for mask in (MASK, None):
        for tree in ("chain", "16"):
            wanted = request(method="naive", draft="a model", tree=tree)
            wanted = replace(wanted, draft=replace(shape, mask_token=mask))
            found[mask, tree] = make_plan(wanted).chosen
        passes = Passes(wanted, make_plan(wanted).placed)
        assert (passes.draft(8) == 8 * passes.draft(1)) == (mask is None)
        assert (passes.draft(8) < 2 * passes.draft(1)) == (mask is not None)
    for tree in ("chain", "16"):
        assert found[MASK, tree].tbt.seconds < found[None, tree].tbt.seconds
        assert found[MASK, tree].draft_s < found[None, tree].draft_s


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pard_token": VOCAB}, CheckpointError, "pard_token is 40, not a token of the vocabulary of 40"),
        ({"pard_token": -1}, CheckpointError, "pard_token"),
        ({"pard2": True}, UnsupportedModel, "PARD-2 .* pickle"),
        ({"spd_type": "pard2"}, UnsupportedModel, "PARD-2 .* pickle"),
        ({}, UnsupportedModel, "PARD-2 .* pickle"),
    ],
)
def test_wrong_folders_are_refused(tmp_path, changes, error, message):
    if not changes:
        (tmp_path / "warp_model.bin").touch()
    make_hf_model("llama", vocab_size=VOCAB, num_hidden_layers=1, **changes).save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        FolderCheckpoint(tmp_path)
