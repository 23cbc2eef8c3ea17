"""Record what `auto` chooses from, along real texts, for the simulation in tests/support/recorded_texts.py.

    python scripts/record_auto.py --cpu-time --context 8192 --link 0.25 --json tests/data/auto/8k.json

The texts are those of scripts/bench_auto.py, decoded plainly. At every token both middle levels compute their
distribution of it: recorded is sum(min(p, q)), in percent. Then steps are timed by rows, in memory and over the link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import bench_auto
import cpu_clock  # before offload
import torch
from bench_peers import machine

from offload import EngineConfig, Sampling, Speculation
from offload.caches.factory import selected_cache
from offload.sequence import TokenSequence
from offload.speculation.drafters.ngram import LookupDrafter
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from offload.speculation.sampling.warp import Sampler, sample

_BETWEEN = 48  # tokens between two selections
ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17, 21, 25)
MIDDLES = ("retrieval", "streaming")


def middles(full: Runner) -> dict[str, SelectedRunner]:
    return {name: SelectedRunner(full, selected_cache(full.cache, Speculation(), name)) for name in MIDDLES}


@torch.inference_mode()
def record_text(full: Runner, ids: list[int], temperature: float, new: int) -> dict[str, list[int]]:
    """Return the acceptances of `new` tokens, and what lookup proposed before each."""
    model, sequence, lookup = full.model, TokenSequence(ids), LookupDrafter()
    full.truncate(len(ids))
    sampler = Sampler(Sampling(temperature=temperature), 0, model.shape.vocab, model.device)
    runners, proposals = middles(full), []
    found: dict[str, list[int]] = {name: [] for name in (*MIDDLES, "kind")}
    for _ in range(new):
        p = sampler.distribution(model.logits(full.rows(sequence)), sequence.tentative)[0]
        for name, runner in runners.items():
            q = sampler.distribution(model.logits(runner.rows(sequence)), sequence.tentative)[0]
            rate = float(torch.minimum(p, q).sum())
            runner.observe(1, rate)
            found[name].append(round(100 * rate))
        found["kind"].append(lookup.draft_kind(sequence) or 0)
        proposals.append(lookup.propose(sequence, ROWS[-1] - 1).tokens)
        sequence.extend([sample(p, sampler.generator)])
        sequence.commit()
    tokens = sequence.tokens[-new:]
    return found | {"right": [agreed(each, tokens[at:]) for at, each in enumerate(proposals)]}


def agreed(proposed: list[int], tokens: list[int]) -> int:
    """Return how many leading tokens are the same."""
    same = (a == b for a, b in zip(proposed, tokens, strict=False))
    return next((n for n, each in enumerate(same) if not each), min(len(proposed), len(tokens)))


@torch.inference_mode()
def seconds(runner: Runner, sequence: TokenSequence, rows: int) -> float:
    """Return the seconds of a pass over the last token and a draft."""
    runner.truncate(len(sequence) - 1)
    start = time.perf_counter()
    runner.model.logits(runner.rows(sequence, [7] * (rows - 1)))
    return time.perf_counter() - start


def by_rows(runner: Runner, sequence: TokenSequence, repeats: int) -> dict[int, float]:
    """Return milliseconds by rows: medians, after a pass of each size that prepares it."""
    times = {rows: [seconds(runner, sequence, rows) for _ in range(repeats + 1)][1:] for rows in ROWS}
    return {rows: round(1e3 * statistics.median(each), 2) for rows, each in times.items()}


def record_times(full: Runner, ids: list[int], repeats: int) -> dict[str, dict]:
    """Return the times of the full cache and of both middle levels, and what the program estimates of them."""
    sequence = TokenSequence([*ids, 5])
    facts = {"full": {"rows": by_rows(full, sequence, repeats), "row_cost": round(full.row_cost(), 4)}}
    full.truncate(len(ids) - 1)
    full.rows(TokenSequence(ids))  # keeps the query that a selection needs
    for name, runner in middles(full).items():
        fact = {"relative_cost": round(runner.relative_cost, 4), "first_cost": round(runner.setup_cost(sequence), 4)}
        first = seconds(runner, sequence, 1)
        runner.renew()
        longer = TokenSequence([*sequence.tokens, *ids[:_BETWEEN]])
        full.rows(longer)
        full.truncate(len(longer) - 1)
        fact["later_cost"] = round(runner.setup_cost(longer), 4)
        later = seconds(runner, longer, 1)
        full.truncate(len(ids))
        rows = by_rows(runner, sequence, repeats)
        fact |= {
            f"{key}_ms": max(round(1e3 * each - rows[1], 1), 0) for key, each in (("first", first), ("later", later))
        }
        facts[name] = fact | {"is_free": runner.setups == 0, "rows": rows}
    return facts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--link", type=float, default=0.25, help="GB/s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-file", type=Path, default=bench_auto.ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/triforce/bench-prompts"))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(cpu_clock.OPTION, action="store_true", help="count the seconds that one thread computes")
    return parser.parse_args(namespace=argparse.Namespace(model=EngineConfig().model, dtype="auto"))


def main() -> None:
    options = parse()
    new = options.new
    options.new += 2 * ROWS[-1]  # room for the drafts that are timed
    texts, times = {}, {}
    for place, link in (("memory", 0.0), (f"{options.link:g} GB/s", options.link)):
        bench = bench_auto.Bench(options, options.context, link)
        for name, ids in sorted(bench.prompts.items(), key=lambda each: -len(each[1])):  # room for the longest
            bench.prefill(name)
            full = bench.engine.idle_session.full
            for temperature in (0, 1) if not link else ():
                texts[f"{name} T={temperature}"] = record_text(full, ids, float(temperature), new)
        times[place] = record_times(full, ids, options.repeats)
    facts = {"context": options.context, "machine": machine(), "times": times, "texts": texts}
    options.json.write_text(json.dumps(facts, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
