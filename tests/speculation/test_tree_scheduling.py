"""The scheduler with trees on simulated times: trees where a verification's rows are free, chains where they cost."""

import random

from offload.sequence import TokenSequence
from offload.settings.tree_settings import TreeSampling, TreeShape
from offload.speculation.auto.adaptive import AdaptiveScheduler, Cycle
from offload.speculation.trees.drafted_trees import DraftTrees
from offload.speculation.trees.tree import tree_of

CHILDREN = (0.55, 0.15, 0.07, 0.04, 0.03, 0.02, 0.01)  # acceptance of the k-th child
LINK = {"step": lambda rows: 0.7 + 0.0004 * rows, "draft_s": 0.012, "relative_cost": 0.02}
MEMORY = {"step": lambda rows: 0.010 + 0.0015 * (rows - 1), "draft_s": 0.003, "relative_cost": 0.3}


class Fake:
    """A drafter whose step takes `draft_s` seconds, and a twentieth more for each further row."""

    name, branches, setups, longest = "draft", True, 0, 24

    def __init__(self, relative_cost):
        self.relative_cost = relative_cost

    def draft_kind(self, sequence):
        return True

    def prior(self, kind):
        return 0.6

    def setup_cost(self, sequence):
        return 0.0


def walk(rng, parents):
    """Return the path that a verification of the tree accepts."""
    tree, node, path = tree_of(parents), -1, []
    while children := tree.children[node + 1]:
        draw, rank = rng.random(), 0
        while rank < len(children) and draw >= (rate := CHILDREN[rank] if rank < len(CHILDREN) else 0.0):
            draw, rank = draw - rate, rank + 1
        if rank == len(children):
            break
        node = children[rank]
        path.append(node)
    return tuple(path)


def simulated(tree, machine, tokens=1000, may_pause=False):
    """Return the seconds per token, the mean rows of the later verifications, and the scheduler."""
    rng, sampling = random.Random(0), TreeSampling.WITHOUT_REPLACEMENT
    shape = TreeShape.parse(tree)
    trees = None if shape.kind == "chain" else lambda: DraftTrees(shape, sampling, may_pause)
    drafter, emitted, seconds, rows = Fake(machine["relative_cost"]), 0, 0.0, []
    scheduler = AdaptiveScheduler([drafter], may_pause=may_pause, horizon=tokens, trees=trees)
    while emitted < tokens:
        chosen, gamma = scheduler.choose(TokenSequence([0]), tokens - emitted)
        parents = None if scheduler.tree is None else scheduler.tree.parents
        path = walk(rng, tuple(range(-1, gamma - 1)) if parents is None else parents)
        inner = gamma if parents is None else sum(map(bool, tree_of(parents).children))
        draft_s = machine["draft_s"] * (gamma + 0.05 * max(inner - gamma, 0))
        cycle = Cycle(chosen, 0, gamma, len(path), draft_s, 0.0, parents=parents, path=path)
        cycle = cycle._replace(verify_s=machine["step"](cycle.rows) * rng.uniform(0.95, 1.05))
        scheduler.observe(cycle)
        emitted += len(path) + 1
        seconds += draft_s + cycle.verify_s
        rows.append(cycle.rows)
    half = rows[len(rows) // 2 :]
    return seconds / emitted, sum(half) / len(half)


def test_trees_are_chosen_over_a_link_and_are_faster_than_every_chain():
    chain, _ = simulated("chain", LINK)
    tree, rows = simulated("auto", LINK)
    assert rows > 100 and chain / tree > 1.3
    for shape, least in (("auto", 1.25), ("64", 1.2), ("k-ary:3x2x1x1", 0.98)):
        assert chain / simulated(shape, LINK, may_pause=True)[0] > least


def test_in_memory_the_choice_is_as_fast_as_chains_and_plain_steps():
    chain, _ = simulated("chain", MEMORY, may_pause=True)
    for shape in ("auto", "64", "k-ary:3x2x2"):
        either, rows = simulated(shape, MEMORY, may_pause=True)
        assert either < 1.05 * chain and either < 0.011  # a plain step takes 0.010 seconds
        assert rows < 6
    fixed, _ = simulated("64", MEMORY)
    assert fixed > 2 * chain
