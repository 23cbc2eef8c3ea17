"""A draft model's tokens stay on the device while it drafts, and nothing is lost if drafting is interrupted."""

import numpy as np
import pytest
import torch

from offload.caches.factory import draft_cache
from offload.constraints.masks import TokenMasks
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.sequence import TokenSequence
from offload.settings.config import Sampling, Speculation
from offload.speculation.drafters import model_drafter
from offload.speculation.drafters.model_drafter import ModelDrafter
from offload.speculation.passes.draft_runner import DraftRunner
from offload.speculation.sampling import warp as sampling_module
from offload.speculation.sampling.warp import Sampler
from offload.speculation.trees.tree import DraftedTree
from tests.support.models import ids, make_hf_model
from tests.support.offloading import CPU

VOCAB, GAMMA = 40, 5
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", vocab_size=VOCAB, num_hidden_layers=1).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, CPU, lambda done, total: None)


@pytest.fixture
def downloads(monkeypatch):
    """The lengths of the tensors that the host has read."""
    found = []
    for module in (model_drafter, sampling_module):
        monkeypatch.setattr(module, "download", lambda values: found.append(len(values)) or values.tolist())
    return found


def new_drafter(model, sampling=GREEDY):
    runner = DraftRunner(
        model, draft_cache(model, Speculation("naive", "a model", sink=3, window=100)), 16
    )  # sees all tokens
    sampler = Sampler(sampling, 0, VOCAB, CPU)
    sampler.observe_prompt(text().tokens)
    return ModelDrafter(runner, sampler)


def text():
    return TokenSequence([token % VOCAB for token in ids(60)])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_a_draft_is_read_at_once(model, downloads, sampling):
    new_drafter(model, sampling).propose(text(), GAMMA)
    assert downloads == [GAMMA + 1]


class OwnTokens:
    """A constraint to tokens that the draft model does not have."""

    def consume(self, token):
        return token >= VOCAB

    def rollback(self, count):
        pass

    def allowed(self):
        return np.arange(VOCAB + 3) >= VOCAB


@pytest.mark.parametrize("tree", [None, DraftedTree((-1, -1, 0, 0, 1))], ids=["chain", "tree"])
def test_a_constraint_to_tokens_that_the_draft_model_lacks_is_kept(model, tree):
    runner = DraftRunner(model, draft_cache(model, Speculation("naive", "a model", sink=3, window=100)), 16)
    sampler = Sampler(Sampling(), 0, VOCAB + 3, CPU, masks=TokenMasks(OwnTokens(), [0], VOCAB + 3))
    draft = ModelDrafter(runner, sampler).propose(text(), 3, tree)
    assert draft.tokens and min(draft.tokens) >= VOCAB


def test_penalties_read_every_token_and_see_those_before_it(model, downloads):
    drafter = new_drafter(model, Sampling(temperature=0, no_repeat_ngram=1))
    draft = drafter.propose(text(), GAMMA)
    assert downloads == [1] * (GAMMA - 1) + [GAMMA + 1]
    assert len({*draft.tokens, *text().tokens}) == GAMMA + len({*text().tokens})


@pytest.mark.parametrize("passes", range(2, GAMMA + 1))
@pytest.mark.parametrize("commits", [False, True], ids=["before", "after"])
def test_an_interrupted_draft_leaves_sequence_and_runner_intact(model, monkeypatch, passes, commits):
    """Whether the pass that is interrupted has committed its keys or not."""
    drafter, sequence, calls, forward = new_drafter(model), text(), [], Model.forward

    def interrupted(self, x, *rest):
        calls.append(len(x))
        if len(calls) == passes:
            if commits:
                forward(self, x, *rest)
            raise KeyboardInterrupt
        return forward(self, x, *rest)

    drafter.propose(sequence, 1)
    monkeypatch.setattr(Model, "forward", interrupted)
    sequence.extend([1])
    with pytest.raises(KeyboardInterrupt):
        drafter.propose(sequence, GAMMA)
    monkeypatch.setattr(Model, "forward", forward)
    assert sequence.tokens == [*text().tokens, 1]
    sequence.extend([2])
    assert drafter.propose(sequence, GAMMA).tokens == new_drafter(model).propose(sequence, GAMMA).tokens
