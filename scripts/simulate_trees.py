"""Simulate token trees: shapes and samplings compared by tokens per verification, without running passes over trees.

    python scripts/simulate_trees.py
    python scripts/simulate_trees.py --record --positions 400 --json rates.json
    python scripts/simulate_trees.py --temperatures 0.2,1 --nodes 16,64

Every node of a simulated tree gets the distributions p and q of a random position: of synthetic ones, or with --record
of the embedded model's on a text, where q is the same model's with the last tokens alone in its context. Children are
drawn and tried as in decoding. The acceptance of the k-th child is measured first, and the best trees follow from it.

The tables are Sequoia's figures 1, 3 and 4 (Chen et al., arXiv 2402.12374): tokens by the number of nodes for the best
tree, a chain, k sequences and k-ary trees; and, for one tree, the samplings at several temperatures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload import EngineConfig, open_model
from offload.sequence import TokenSequence
from offload.settings.tree_settings import TreeSampling
from offload.speculation.passes.runner import Runner
from offload.speculation.trees.shape import best_tree, expected_tokens
from offload.speculation.trees.tree import chain, k_ary, tree_of
from offload.speculation.trees.tree_verification import Siblings, draw_children

ROOT = Path(__file__).parents[1]
CHILDREN = 16  # whose acceptance is measured
DEPTH = 24
KEPT = 256  # tokens of each position: the likeliest of either model, so that the simulation is fast
SAMPLINGS = (TreeSampling.WITHOUT_REPLACEMENT, TreeSampling.WITH_REPLACEMENT, TreeSampling.TOP_K)


class Positions:
    """Logits of the target and of the drafter at independent positions, `[positions, tokens]` each."""

    def __init__(self, target: Tensor, drafter: Tensor, seed: int = 0) -> None:
        self.target, self.drafter = target, drafter
        self.generator = torch.Generator().manual_seed(seed)

    def accepted_ranks(self, count: int, children: int, temperature: float, sampling: TreeSampling) -> Tensor:
        """Return which child is accepted at `count` random positions: its rank, or `children` if none is."""
        rows = torch.randint(len(self.target), (count,), generator=self.generator)
        p = (self.target[rows] / temperature).softmax(-1)
        logits = self.drafter[rows] / temperature
        q = logits.softmax(-1)
        tokens = draw_children(logits if sampling is TreeSampling.TOP_K else q, children, self.generator, sampling)
        if sampling is TreeSampling.TOP_K:  # tried as if certain: the token that p draws is among them, or not
            drawn = p.multinomial(1, generator=self.generator)
            found = tokens == drawn
            return torch.where(found.any(1), found.long().argmax(1), children)
        siblings, rank = Siblings(p, q, sampling), torch.full((count,), children)
        for index, drafted in enumerate(tokens.T):
            p_x, q_x = siblings.probabilities(drafted)
            accepted = torch.rand(count, generator=self.generator) * q_x < p_x
            rank = torch.where(accepted & (rank == children), index, rank)
            siblings.reject(drafted)
        return rank

    def acceptance(self, temperature: float, sampling: TreeSampling, count: int = 2000) -> tuple[float, ...]:
        """Return the measured acceptance of each child, not increasing."""
        ranks = torch.cat([self.accepted_ranks(500, CHILDREN, temperature, sampling) for _ in range(count // 500)])
        shares = ranks.bincount(minlength=CHILDREN + 1)[:CHILDREN] / len(ranks)
        return tuple(shares.cummin(0).values.tolist())

    def tokens(self, parents: Sequence[int], temperature: float, sampling: TreeSampling, count: int = 1000) -> float:
        """Return the mean tokens per verification of a tree, over `count` simulated verifications."""
        tree = tree_of(parents)
        nodes = [0] * count  # where each verification stands, plus 1
        emitted = count
        while nodes:
            most = max(len(tree.children[node]) for node in nodes)
            if not most:
                break
            ranks = self.accepted_ranks(len(nodes), min(most, CHILDREN), temperature, sampling).tolist()
            nodes = [
                tree.children[node][rank] + 1
                for node, rank in zip(nodes, ranks, strict=True)
                if rank < min(len(tree.children[node]), CHILDREN)
            ]
            emitted += len(nodes)
        return emitted / count


def synthetic(positions: int = 400, vocab: int = KEPT, noise: float = 1.2, seed: int = 0) -> Positions:
    """Return positions whose logits fall like Zipf's law, from certain to open ones; the drafter's are off by noise."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = 0.5 + 2.5 * torch.rand(positions, 1, generator=generator)
    order = torch.rand(positions, vocab, generator=generator).argsort(-1) + 1
    target = -sharpness * 1.6 * order.log()
    return Positions(target, target + noise * torch.randn(target.shape, generator=generator), seed)


@torch.inference_mode()
def recorded(text: Path, positions: int, window: int) -> Positions:
    """Return positions of the embedded model on a text; the drafter sees the last `window` tokens alone."""
    opened = open_model(EngineConfig())
    model = opened.load().model
    ids = opened.tokenizer.encode(text.read_text("utf-8"), special_tokens=True)[: window * 2 + positions]
    full = Runner(model, model.new_cache(len(ids) + 1))
    targets, drafters = [], []
    sequence = TokenSequence(ids[: -positions + 1])
    for end in range(len(ids) - positions + 1, len(ids) + 1):
        p = model.logits(full.rows(sequence))[-1]
        small = Runner(model, model.new_cache(window + 1))
        q = model.logits(small.rows(TokenSequence(ids[end - window : end])))[-1]
        kept = torch.maximum(p - p.amax(), q - q.amax()).topk(KEPT).indices
        targets.append(p[kept].float())
        drafters.append(q[kept].float())
        sequence.extend(ids[end : end + 1])
    return Positions(torch.stack(targets), torch.stack(drafters))


def shapes(rates: tuple[float, ...], nodes: int) -> dict[str, tuple[int, ...]]:
    """Return the trees of about `nodes` nodes that are compared."""
    found = {"best tree": best_tree(rates, nodes, DEPTH), "chain": chain(min(nodes, DEPTH))}
    for k in (4, 8):
        if nodes >= 2 * k:
            found[f"{k} sequences"] = k_ary((k,) + (1,) * (nodes // k - 1))
    for k in (2, 3):
        widths = [k]
        while len(k_ary((*widths, k))) <= nodes:
            widths.append(k)
        found[f"{k}-ary"] = k_ary(widths)
    return found


def compare_shapes(source: Positions, sizes: Sequence[int], temperature: float) -> list[dict]:
    """Return, for each size and shape, the predicted and the simulated tokens per verification."""
    rates = source.acceptance(temperature, TreeSampling.WITHOUT_REPLACEMENT)
    return [
        {
            "nodes": nodes,
            "shape": name,
            "predicted": expected_tokens(parents, rates),
            "simulated": source.tokens(parents, temperature, TreeSampling.WITHOUT_REPLACEMENT),
        }
        for nodes in sizes
        for name, parents in shapes(rates, nodes).items()
    ]


def compare_samplings(source: Positions, nodes: int, temperatures: Sequence[float]) -> list[dict]:
    """Return, for each temperature, the tokens per verification of one tree by sampling: the best one at 0.6."""
    parents = best_tree(source.acceptance(0.6, TreeSampling.WITHOUT_REPLACEMENT), nodes, DEPTH)
    return [
        {"temperature": each} | {sampling.value: source.tokens(parents, each, sampling) for sampling in SAMPLINGS}
        for each in temperatures
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the embedded model, instead of synthetic positions")
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein-opening.txt")
    parser.add_argument("--positions", type=int, default=300)
    parser.add_argument("--window", type=int, default=24, help="tokens that the recorded drafter sees")
    parser.add_argument("--nodes", default="8,16,32,64,128,256")
    parser.add_argument("--temperature", type=float, default=0.6, help="of the table of shapes")
    parser.add_argument("--temperatures", default="0.2,0.4,0.6,0.8,1,1.2", help="of the table of samplings")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    options = parse()
    temperatures = [float(each) for each in options.temperatures.split(",")]
    source = recorded(options.prompt_file, options.positions, options.window) if options.record else synthetic()
    results = {
        "acceptance": {
            f"{each:g}": {sampling.value: source.acceptance(each, sampling) for sampling in SAMPLINGS}
            for each in temperatures
        },
        "shapes": compare_shapes(source, [int(each) for each in options.nodes.split(",")], options.temperature),
        "samplings": compare_samplings(source, 64, temperatures),
    }
    for temperature, by_sampling in results["acceptance"].items():
        for name, rates in by_sampling.items():
            print(f"T {temperature:4} {name:20} acceptance of a child " + " ".join(f"{rate:.3f}" for rate in rates[:6]))
    for row in results["shapes"]:
        text = f"{row['nodes']:4} nodes  {row['shape']:12} predicted {row['predicted']:.2f}"
        print(f"{text}  simulated {row['simulated']:.2f} tokens per verification")
    for row in results["samplings"]:
        print(f"T {row['temperature']:<4g} " + "  ".join(f"{each.value} {row[each.value]:.2f}" for each in SAMPLINGS))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
