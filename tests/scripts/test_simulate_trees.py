"""Sequoia's claims in simulation: predictions hold, trees keep growing, and drawing without replacement is best."""

import importlib.util
import itertools

import pytest

from offload.settings.tree_settings import TreeSampling
from offload.speculation.trees.shape import best_tree, expected_tokens
from offload.speculation.trees.tree import k_ary
from tests.support.paths import SCRIPTS

WITHOUT, WITH, TOP_K = TreeSampling.WITHOUT_REPLACEMENT, TreeSampling.WITH_REPLACEMENT, TreeSampling.TOP_K


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("simulate_trees", SCRIPTS / "simulate_trees.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rates(simulation):
    return simulation.synthetic(vocab=64).acceptance(0.6, WITHOUT, count=6000)


@pytest.mark.parametrize("nodes", [16, 64])
def test_predicted_tokens_are_within_five_percent_of_simulated_ones(simulation, rates, nodes):
    parents = best_tree(rates, nodes, 24)
    simulated = simulation.synthetic(vocab=64).tokens(parents, 0.6, WITHOUT, count=3000)
    assert expected_tokens(parents, rates) == pytest.approx(simulated, rel=0.05)


def test_the_best_tree_keeps_growing_where_sequences_saturate(rates):
    """Sequoia's figures 1 and 4: each four times the nodes bring a token or so; k sequences stop at some length."""
    best = [expected_tokens(best_tree(rates, nodes, 64), rates) for nodes in (16, 64, 256, 1024)]
    sequences = [expected_tokens(k_ary((8,) + (1,) * (nodes // 8 - 1)), rates) for nodes in (64, 256, 1024)]
    assert all(later > earlier + 0.9 for earlier, later in itertools.pairwise(best))
    assert sequences[2] < sequences[1] + 0.05 and best[3] > 1.33 * sequences[2]


@pytest.mark.parametrize("temperature", [0.2, 0.6, 1.2])
def test_drawing_without_replacement_is_never_worse(simulation, rates, temperature):
    parents = best_tree(rates, 64, 24)
    tokens = {
        sampling: simulation.synthetic(vocab=64).tokens(parents, temperature, sampling, count=1000)
        for sampling in TreeSampling
    }
    assert tokens[WITHOUT] > 1.05 * tokens[WITH]
    assert tokens[WITHOUT] > (0.95 if temperature < 0.5 else 1.0) * tokens[TOP_K]
