"""Trees are lossless: tokens drawn, verified and emitted over several verifications follow the target."""

import itertools

import pytest
import torch

from offload.settings.config import Sampling
from offload.settings.tree_settings import TreeSampling
from offload.speculation.trees import verification
from offload.speculation.trees.shape import best_tree
from offload.speculation.trees.tree import ROOT, Draft, Tree, k_ary
from tests.support.table_models import DRAFTS, TARGET, VOCAB, p_value, warped

SIGNIFICANCE, RUNS, MANY = 1e-3, 500, 20_000
WITHOUT, WITH, TOP_K = TreeSampling.WITHOUT_REPLACEMENT, TreeSampling.WITH_REPLACEMENT, TreeSampling.TOP_K
T1 = Sampling(temperature=1, top_p=1)
TREES = {
    "random": (ROOT, ROOT, 0, 1, 1, 0, 3, 2, 6),
    "best of 12": best_tree((0.5, 0.2, 0.1, 0.05), 12, 4),
    "all children": k_ary((VOCAB,)),
}
DRAFTERS = DRAFTS | {"identical": TARGET, "one token": torch.full_like(TARGET, -1e9).index_fill(2, torch.tensor(2), 0)}


class TreeLevel:
    """Drafts a tree from one table, and verifies it with another."""

    def __init__(self, parents, drafter, sampling, verified_with=None):
        self.tree, self.sampling = Tree(parents), sampling
        self.target, self.rows = warped(TARGET, T1), warped(drafter, T1)
        self.told = self.rows if verified_with is None else warped(verified_with, T1)
        self.generator = torch.Generator().manual_seed(0)

    def advance(self, sequence, limit):
        states, tokens = [tuple(sequence.tokens[-2:])], [0] * len(self.tree)
        states += [None] * len(self.tree)
        for head, children in enumerate(self.tree.children):
            if children:
                row = self.rows[states[head]].unsqueeze(0)
                drawn = verification.draw_children(row, len(children), self.generator, self.sampling)[0].tolist()
                for child, token in zip(children, drawn, strict=True):
                    tokens[child], states[child + 1] = token, (states[head][1], token)
        first, second = torch.tensor(states).T
        draft = Draft(tokens, self.told[first, second], self.tree.parents)
        path, token = verification.verify(draft, self.target[first, second], self.generator, self.sampling)
        sequence.extend([*(tokens[node] for node in path), token])


CASES = [
    ("random", "good", WITHOUT, RUNS, ()),
    ("best of 12", "adversarial", WITH, RUNS, ()),
    ("all children", "one token", WITHOUT, RUNS, ()),
    ("best of 12", "uniform", TOP_K, RUNS, ()),
    *((*case, MANY, pytest.mark.long) for case in itertools.product(TREES, DRAFTERS, TreeSampling)),
]


@pytest.mark.daily("random-good-*-500", "all children-*-500")
@pytest.mark.parametrize(
    ("tree", "drafter", "sampling", "runs"), [pytest.param(*case[:4], marks=case[4]) for case in CASES]
)
def test_the_first_three_tokens_are_distributed_as_in_plain_decoding(tree, drafter, sampling, runs):
    assert p_value(TreeLevel(TREES[tree], DRAFTERS[drafter], sampling), T1, runs) > SIGNIFICANCE


@pytest.mark.long
def test_verifying_with_other_rows_than_the_drafter_s_is_detected():
    level = TreeLevel(TREES["random"], DRAFTERS["adversarial"], WITHOUT, DRAFTERS["uniform"])
    assert p_value(level, T1, RUNS) < SIGNIFICANCE


def test_emitting_the_target_instead_of_the_residual_is_detected(monkeypatch):
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert p_value(TreeLevel(TREES["random"], DRAFTERS["uniform"], WITHOUT), T1, RUNS) < SIGNIFICANCE
