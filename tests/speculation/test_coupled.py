"""Coupled sampling: the text depends on the noise alone, and is distributed as plain decoding's."""

from functools import cache

import pytest
import torch

from offload.sequence import TokenSequence
from offload.settings.config import Sampling
from offload.speculation.sampling.noise import Noise
from tests.support.table_models import DRAFTS, PROMPT, VOCAB, hierarchy

SAMPLINGS = {"t1": Sampling(temperature=1, top_p=1), "t0.6": Sampling(temperature=0.6, top_p=0.9)}
METHODS = [
    *((method, "lookup") for method in ("lookup", "retrieval", "triforce", "streaming", "auto")),
    *((method, draft) for method in ("naive", "triforce", "auto") for draft in DRAFTS),
]
TREES = [
    ("naive", "good", "k-ary:3x2"),
    ("naive", "uniform", "7"),
    ("lookup", "lookup", "8"),
    ("retrieval", "lookup", "5"),
    ("triforce", "good", "k-ary:2x2x1"),
    ("auto", "one-hot", "6"),
]
RUNS, LENGTH = 12, 20
FAR = 32  # positions between two runs: they stand for runs with other seeds


class TableNoise(Noise):
    """The noise of many runs over a vocabulary of 8, computed at once."""

    def __init__(self):
        super().__init__(0)
        self.run = 0
        self._rows = _rows()

    def scores(self, probs, positions):
        return probs / self._rows[[self.run * FAR + position for position in positions]]


@cache
def _rows():
    count = 400 * FAR
    positions = torch.arange(count).repeat_interleave(VOCAB)
    return Noise(0).of_tokens(positions, torch.arange(VOCAB).repeat(count)).view(count, VOCAB)


def text(top, length=LENGTH):
    """Return the tokens after the prompt."""
    sequence = TokenSequence(PROMPT)
    while len(sequence) < len(PROMPT) + length:
        top.advance(sequence, len(PROMPT) + length - len(sequence))
        sequence.commit()
    return sequence.tokens[len(PROMPT) :]


def texts(method, draft, sampling, gammas=(None, None), runs=RUNS, noise=None, length=LENGTH, **trees):
    noise = noise or TableNoise()
    top = hierarchy(method, draft, sampling, gammas, noise=noise, **trees).top
    found = []
    for noise.run in range(runs):
        found.append(text(top, length))
    return found


@pytest.fixture(scope="module", params=SAMPLINGS)
def plain(request):
    sampling = SAMPLINGS[request.param]
    return sampling, texts("ar", "lookup", sampling)


def test_the_noise_of_these_tests_is_the_program_s(plain):
    sampling, expected = plain
    assert texts("ar", "lookup", sampling, runs=1, noise=Noise(0)) == expected[:1]
    assert expected[0] != expected[1]


@pytest.mark.daily("t0.6-*", "t1-naive-*")
@pytest.mark.parametrize(("method", "draft"), METHODS)
def test_every_method_gives_plain_decoding_s_text(plain, method, draft):
    sampling, expected = plain
    assert texts(method, draft, sampling) == expected


@pytest.mark.parametrize(("method", "draft", "tree"), TREES)
def test_trees_give_plain_decoding_s_text(plain, method, draft, tree):
    sampling, expected = plain
    assert texts(method, draft, sampling, runs=8, tree=tree) == expected[:8]


def test_a_tree_s_other_branches_are_accepted_too():
    """Two children with the target's noise: the second is accepted where the first, alone, would have been rejected."""
    passes = []
    for tree in ("chain", "k-ary:1", "k-ary:2"):
        noise = TableNoise()
        top = hierarchy("naive", "uniform", SAMPLINGS["t1"], (1, 1), noise=noise, tree=tree).top
        for noise.run in range(30):
            text(top)
        passes.append(top.statistics["draft"].verifications)
    assert passes[0] == passes[1] > passes[2] + 5
