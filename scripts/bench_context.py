"""Measure ms per token of each method against the length of the context, with a streamed KV cache. One process.

    python scripts/bench_context.py --json out.json
    python scripts/bench_context.py --contexts 1000 2000 --methods retrieval triforce

All KV is streamed over a simulated link, so this runs without a GPU. The contexts are prefixes of one text, the longest
first, so that the text is prefilled once. The model decodes greedily; `same` is whether a method's tokens equal those
of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench_offload import METHODS, Bench
from bench_peers import machine

from offload import EngineConfig

ROOT = Path(__file__).parents[1]


def measure(bench: Bench, contexts: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each context and method: ms per token, and whether the tokens equal plain decoding's."""
    text, rows = bench.prompt, []
    bench.place("stream", bandwidth=args.bandwidth * 1e9)
    for context in sorted(contexts, reverse=True):
        bench.prompt = text[:context]
        plain = None
        for method in ("ar", *args.methods):
            ids, seconds = bench.decode(method, args.new, budget=args.budget)
            plain = plain or ids
            rows.append({"context": context, "method": method, "ms": 1e3 * seconds, "same": ids == plain})
            print(f"{context:7,} {method:10} {1e3 * seconds:6.0f} ms a token", flush=True)
    return rows


def main() -> None:
    """Measure, print a line for each method, and write the JSON file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--new", type=int, default=32, help="tokens of each run")
    parser.add_argument("--bandwidth", type=float, default=0.25, help="GB/s")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.prompt_tokens = max(args.contexts)
    bench = Bench(args)
    rows = measure(bench, args.contexts, args)
    if args.json:
        facts = {"machine": machine(), "bandwidth_gb_s": args.bandwidth, "new_tokens": args.new, "budget": args.budget}
        args.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
