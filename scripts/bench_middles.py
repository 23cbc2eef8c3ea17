"""Measure a step of each middle level and the passes of the full cache at a length, in CPU time, and what follows.

    python scripts/bench_middles.py --cpu-time --tokens 32000 --acceptance 0.82,0.81,0.97,0.95

Keys and values are random: times do not depend on them. Levels take turns. The speed-up over plain decoding is that of
drafts of the best length by the level alone, at an acceptance of each (scripts/bench_acceptance.py).
"""

from __future__ import annotations

import argparse
import statistics
import time

import cpu_clock  # before offload
import torch
from bench_peers import machine

from offload import EngineConfig, Speculation, open_model
from offload.caches.factory import selected_cache
from offload.kernels.native.threads import torch_on_one_thread
from offload.sequence import TokenSequence
from offload.settings.config import EXACT
from offload.speculation.passes.estimators import StepTimes, expected_tokens
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner

LEVELS = {"retrieval": "packed", "streaming": "packed", "plane": "packed", "q4": EXACT}  # and the full cache below
ROWS = (1, 2, 4, 8)
SPARE, PIECE = 64, 512  # tokens that may follow, and that are restored at once


def restore(full: Runner, ids: list[int]) -> None:
    """Restore random keys and values of tokens."""
    like = full.cache.store.dump(0, PIECE)
    piece = torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like.dtype)
    for start in range(0, len(ids) - PIECE, PIECE):
        full.restore(start, ids[start : start + PIECE], piece)


def measure(model, kv: str, names: list[str], tokens: int, repeats: int) -> tuple[StepTimes, dict[str, float]]:
    """Return the seconds of passes over a full cache in a format, by rows, and those of a step of each level."""
    model.kv = kv
    full, sequence = Runner(model, model.new_cache(tokens + SPARE)), TokenSequence([7] * tokens)
    restore(full, sequence.tokens[:-1])
    levels = {
        name: SelectedRunner(full, selected_cache(full.cache, Speculation("retrieval", middle=name))) for name in names
    }
    times: dict[str | int, list[float]] = {each: [] for each in (*ROWS, *levels)}
    for _ in range(repeats + 1):
        for each, seconds in times.items():
            runner, draft = (levels[each], 0) if each in levels else (full, int(each) - 1)
            runner.truncate(tokens - 1)
            started = time.perf_counter()
            runner.rows(sequence, [7] * draft)
            seconds.append(time.perf_counter() - started)
            full.truncate(tokens - 1)
    found = {each: statistics.median(seconds[1:]) for each, seconds in times.items()}  # the first ones select
    steps = StepTimes()
    for rows in ROWS:
        steps.observe(rows, found[rows])
    return steps, {name: found[name] for name in levels}


def speedup(steps: StepTimes, step_s: float, acceptance: float) -> tuple[float, int]:
    """Return the speed-up over plain decoding of drafts of the best length, and that."""
    rates = {n: expected_tokens(acceptance, n) / (n * step_s + steps.of(n + 1)) for n in range(1, ROWS[-1])}
    best = max(rates, key=rates.__getitem__)
    return rates[best] * steps.of(1), best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--acceptance", default="0.9,0.9,0.97,0.96", help=f"of {', '.join(LEVELS)}")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument(cpu_clock.OPTION, action="store_true", help="count the seconds that one thread computes")
    options = parser.parse_args()
    rates = dict(zip(LEVELS, map(float, options.acceptance.split(",")), strict=True))
    model = (
        open_model(EngineConfig(model=options.model, dtype="bfloat16")).stretched(options.tokens + SPARE).load().model
    )
    print(f"{options.tokens:,} tokens; {machine()}{', CPU time of one thread' if cpu_clock.IN_USE else ''}")
    for kv in dict.fromkeys(LEVELS.values()):
        names = [name for name, needed in LEVELS.items() if needed == kv]
        with torch.inference_mode(), torch_on_one_thread(model.operations.kernel):
            steps, found = measure(model, kv, names, options.tokens, options.repeats)
        print(f"full {kv:9} ms by rows: {', '.join(f'{rows}: {1e3 * steps.of(rows):.1f}' for rows in ROWS)}")
        for name, step_s in found.items():
            gain, drafted = speedup(steps, step_s, rates[name])
            share = step_s / steps.of(1)
            print(f"{name:14} {1e3 * step_s:6.1f} ms a step, {share:.2f} of plain; {drafted} drafted: {gain:.2f} x")


if __name__ == "__main__":
    main()
