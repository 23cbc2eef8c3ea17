"""Measure token trees against chains over a simulated link. Ratios from one process, without a GPU.

    python scripts/bench_trees.py
    python scripts/bench_trees.py --drafters model --streamed weights --prompt-tokens 1000 --window 16 --json out.json
    python scripts/bench_trees.py --streamed nothing

What is streamed over the link is the full KV cache (0.25 GB/s by default) or the model's weights: then a verification
takes the same time for few rows and for many. Drafters are n-gram lookup, the model itself on a StreamingLLM cache, and
the model on its retrieval cache. Shapes are those of `--tree`; `chain` has adaptive draft lengths, `chain:8` drafts 8.
The rounds are interleaved; the table has medians, relative to the fastest chain. Greedy outputs are compared with as
many tokens of plain decoding as it makes. The prompt is prefilled over a fast link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_offload import FAST
from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.events import LevelStatistics, Speculated
from offload.level_metrics import acceptance, tokens_per_verification, trees
from offload.memory.tier_settings import TierSettings

ROOT = Path(__file__).parents[1]
SHAPES = ("chain", "chain:8", "chain:16", "16", "64", "256", "auto")
DRAFTERS = {"lookup": ("lookup", "lookup"), "model": ("naive", "a model"), "retrieval": ("retrieval", "none")}
LARGEST = "auto"  # its room in the caches is enough for the others


class TreeBench:
    """An engine whose full KV cache or weights are streamed over a link that can be throttled."""

    def __init__(self, args: argparse.Namespace) -> None:
        opened = open_model(EngineConfig(model=args.model, device="cpu", dtype=args.dtype))
        layers = opened.checkpoint.shape.layers
        tiers = {
            "kv": TierSettings(link_gb_s=FAST / 1e9),
            "weights": TierSettings(resident_layers=layers, weight_layers=0, link_gb_s=FAST / 1e9),
            "nothing": None,
        }[args.streamed]
        loaded, draft = opened.load(tiers=tiers), opened.load().model
        self.engine = Engine(loaded.model, (), 512, draft, loaded.stores)
        self._args = args
        self.prompt = opened.tokenizer.encode(args.text.read_text("utf-8"), special_tokens=True)[: args.prompt_tokens]
        self.decode("ar", "none", LARGEST, 0, 2)
        if loaded.stores is not None:
            loaded.stores.link.bandwidth = args.link * 1e9

    def decode(self, method: str, draft: str, shape: str, seed: int, new: int) -> dict[str, Any]:
        """Return the tokens of a run, the seconds per token after the first event, and the statistics."""
        args, (tree, _, gamma) = self._args, shape.partition(":")
        if tree == "k-ary":
            tree, gamma = shape, ""
        settings = {
            "sink": args.sink,
            "window": args.window,
            "budget": args.budget,
            "tree_sampling": args.tree_sampling,
        }
        speculation = Speculation(method, draft, gamma2=int(gamma) if gamma else None, tree=tree, **settings)
        sampling = Sampling(temperature=args.temperature, top_p=1.0)
        ids: list[int] = []
        times: list[tuple[float, int]] = []
        levels: tuple[LevelStatistics, ...] = ()
        config = GenerationConfig(max_new_tokens=new, seed=seed)
        for event in self.engine.generate(self.prompt, sampling, config, speculation):
            if isinstance(event, Speculated):
                levels = event.levels
            elif isinstance(event, Tokens):
                ids += event.ids
                times.append((time.perf_counter(), len(ids)))
        (first, before), (last, after) = times[0], times[-1]
        found = {"ids": ids, "seconds": (last - first) / max(after - before, 1), "trees": trees(levels)}
        return found | {"tokens": tokens_per_verification(levels), "acceptance": acceptance(levels)}


def measure(bench: TreeBench, drafter: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for plain decoding and for each shape of a drafter's drafts, and print them."""
    method, draft = DRAFTERS[drafter]
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], **{shape: [] for shape in args.shapes}}
    for seed in range(args.repeats):
        for shape, done in runs.items():
            how = ("ar", "none", LARGEST) if shape == "plain" else (method, draft, shape)
            done.append(bench.decode(*how, seed, args.new_plain if shape == "plain" else args.new))
            took = f"{1e3 * done[-1]['seconds']:.0f} ms/token, {done[-1]['tokens']:.2f} tokens/verification"
            print(f"{drafter} {shape}: {took}", file=sys.stderr, flush=True)
    expected = runs["plain"][0]["ids"]
    seconds = {shape: statistics.median(run["seconds"] for run in done) for shape, done in runs.items()}
    best = min((seconds[shape] for shape in seconds if shape.startswith("chain")), default=seconds["plain"])
    rows = []
    for shape, done in runs.items():
        row = {
            "drafter": drafter,
            "shape": shape,
            "ms": 1e3 * seconds[shape],
            "of_plain": seconds["plain"] / seconds[shape],
        }
        row |= {"of_best_chain": best / seconds[shape], "tokens": statistics.mean(run["tokens"] for run in done)}
        row["same"] = all(run["ids"][: len(expected)] == expected for run in done) if args.temperature == 0 else None
        row |= {name: done[-1][name] for name in ("acceptance", "trees")}
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    shape = " ".join(
        f"{tree['nodes']:.0f} nodes {tree['depth']:.1f} deep, children "
        + ", ".join(f"{rate:.2f}" for rate in tree["child_acceptance"][:3])
        for tree in row["trees"].values()
    ) or ", ".join(f"{pair} {rate:.2f}" for pair, rate in row["acceptance"].items())
    differs = "" if row["same"] in (None, True) else "  DIFFERS"
    return (
        f"{row['drafter']:10} {row['shape']:10} {row['ms']:6.0f} ms/token  {row['of_plain']:5.2f} of plain  "
        f"{row['of_best_chain']:5.2f} of the best chain  {row['tokens']:5.2f} tokens/verification  {shape}{differs}"
    )


def main() -> int:
    """Measure, print a line for each shape, and write the JSON file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--new", type=int, default=64, help="tokens of a run")
    parser.add_argument("--new-plain", type=int, default=8, help="tokens of a run of plain decoding")
    parser.add_argument("--streamed", choices=("kv", "weights", "nothing"), default="kv")
    parser.add_argument("--link", type=float, default=0.25, help="GB/s")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tree-sampling", default="without-replacement")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=240)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = TreeBench(args)
    print(f"{len(bench.prompt):,} tokens, {args.streamed} streamed at {args.link} GB/s; {machine()}", flush=True)
    rows = [row for drafter in args.drafters for row in measure(bench, drafter, args)]
    if args.json:
        facts = {key: value for key, value in vars(args).items() if key not in ("json", "text", "shapes")}
        args.json.write_text(json.dumps({"machine": machine(), **facts, "rows": rows}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
