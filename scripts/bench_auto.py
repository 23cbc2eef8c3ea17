"""Compare `auto` with plain decoding on text that defeats drafts and on text that repeats. Ratios from one process.

    python scripts/bench_auto.py --prompt-tokens 8000
    python scripts/bench_auto.py --scenario unpredictable --repeats 9 --json out.json

Two scenarios on one model. `unpredictable`: the model continues the book at temperature 1.2, so drafts fail. `quoting`:
after the book the model is asked to repeat a passage of it, which greedy decoding does, again and again. Runs of plain
decoding and of the method are interleaved, so that drift of the machine's speed affects both. A ratio is of times per
token, the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, Tokens, open_model
from offload.engine import Engine

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Scenario:
    """A prompt, its sampling, and the highest acceptable ratio of times per token, method / plain."""

    prompt: list[int]
    sampling: Sampling
    wanted: float


def scenarios(tokenizer, text: str, tokens: int) -> dict[str, Scenario]:
    """Return both scenarios, built on the first `tokens` tokens of a book."""
    book = tokenizer.encode(text, special_tokens=True)[:tokens]
    body, passage = (tokenizer.decode(part) for part in (book[: tokens - 200], book[tokens // 4 : tokens // 4 + 60]))
    task = tokenizer.chat(f"{body}\n\nRepeat the following text word for word, three times: {passage}", None)
    return {
        "unpredictable": Scenario(book, Sampling(temperature=1.2, top_p=1), 1.05),
        "quoting": Scenario(task, Sampling(temperature=0), 1 / 1.8),
    }


def timed(engine: Engine, scenario: Scenario, new: int, seed: int, settings: Speculation) -> tuple[float, Speculated]:
    """Return seconds per token after the first, and the last speculation statistics."""
    first = emitted = last = 0
    state = None
    generation = GenerationConfig(max_new_tokens=new, seed=seed)
    for event in engine.generate(scenario.prompt, scenario.sampling, generation, settings):
        if isinstance(event, Tokens):
            last = time.perf_counter()
            first = first or last
            emitted += len(event.ids)
        elif isinstance(event, Speculated):
            state = event
    return (last - first) / (emitted - 1), state


def measure(engine: Engine, scenario: Scenario, options: argparse.Namespace) -> dict:
    """Run plain decoding and the method alternately; return medians, their ratio and every run."""
    rows = []
    settings = Speculation(options.method, options.draft, budget=options.budget)
    for seed in range(options.repeats):
        plain, _ = timed(engine, scenario, options.new, seed, Speculation("ar"))
        method, state = timed(engine, scenario, options.new, seed, settings)
        drafts = {
            f"{row.drafter} -> {row.verifier}": [row.verifications, row.drafted, row.accepted] for row in state.levels
        }
        rows.append({"plain_s": plain, "method_s": method, "drafts": drafts})
        print(f"  {plain * 1e3:.1f} and {method * 1e3:.1f} ms a token, {method / plain:.3f}; {drafts}", file=sys.stderr)
    plain, method = (statistics.median(row[key] for row in rows) for key in ("plain_s", "method_s"))
    ratio = statistics.median(row["method_s"] / row["plain_s"] for row in rows)
    return {"plain_s": plain, "method_s": method, "ratio": ratio, "wanted": scenario.wanted, "runs": rows}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--scenario", choices=("unpredictable", "quoting", "both"), default="both")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--budget", type=int, default=Speculation().budget)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    options = parse()
    settings = Speculation(options.method, options.draft, budget=options.budget)
    opened = open_model(EngineConfig(model=options.model, dtype=options.dtype), speculation=settings)
    loaded = opened.load()
    engine = loaded.without_end()
    chosen = scenarios(opened.tokenizer, options.prompt_file.read_text("utf-8"), options.prompt_tokens)
    results = {}
    for name, scenario in chosen.items():
        if options.scenario in (name, "both"):
            print(f"{name}:", file=sys.stderr)
            results[name] = measure(engine, scenario, options)
    print(f"{options.method} against plain decoding, {options.prompt_tokens:,} prompt tokens; {machine()}")
    for name, row in results.items():
        times = f"{row['plain_s'] * 1e3:.1f} -> {row['method_s'] * 1e3:.1f} ms a token"
        print(f"{name:14} {times}, time {row['ratio']:.3f} of plain (wanted: {row['wanted']:.3f} at most)")
    if options.json:
        facts = {"machine": machine(), "prompt_tokens": options.prompt_tokens, "new_tokens": options.new}
        options.json.write_text(json.dumps(facts | {"method": options.method, "results": results}, indent=2))


if __name__ == "__main__":
    main()
