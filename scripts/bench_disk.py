"""Measure decoding with keys and values on disk against memory and against the plan. One process.

    python scripts/bench_disk.py --folder /mnt/nvme --host-memory 100MB
    python scripts/bench_disk.py --folder /mnt/nvme --methods retrieval auto --json out.json

The prompt is prefilled once, in memory, and restored to disk. In each round the disk is read in sequence just before a
method runs, because shared disks change their rate: the plan is made with that rate, and `ratio` is measured over
planned time, the median of the rounds. `same` is whether the tokens are those of plain decoding in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.hardware.microbenchmarks import BenchmarkSizes, disk_rate, measure
from offload.hardware.profiles import load
from offload.hardware.rates import describe
from offload.memory.tier_settings import TierSettings
from offload.planning.plan import Plan, make_plan
from offload.planning.request import PlanRequest
from offload.prompt_cache.folder import PromptFolder
from offload.settings.config import Placement
from offload.units import GIB, parse_size

ROOT = Path(__file__).parents[1]
QUICK = BenchmarkSizes(read=2**27, host_rows=512, disk=2**27, seconds=0)


class Bench:
    """A model over its caches in memory and on disk, and plans for the latter."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.opened = args, open_model(EngineConfig(model=args.model))
        self.prompts = args.prompts or Path(tempfile.mkdtemp())
        self.ids = self.opened.tokenizer.encode(args.text.read_text("utf-8"), True)[: args.tokens]
        profile = load("cpu")
        self._hardware = describe(profile.with_rates(host=measure("cpu", sizes=QUICK).host), 64 * GIB)

    def plan(self, method: str, gb_s: float) -> Plan:
        """Return the plan with a rate of the disk."""
        placement = Placement(host_memory=self.args.host_memory, disk=str(self.args.folder))
        tokens, opened = self.args.tokens + self.args.new, self.opened
        hardware = replace(self._hardware, disk=gb_s * 1e9)
        settings, bits = Speculation(method), opened.weight_bits
        chunk = opened.config.prefill_chunk
        return make_plan(
            PlanRequest(
                "m", opened.shape, tokens, hardware, placement, settings, chunk, opened.dtype.itemsize, weight_bits=bits
            )
        )

    def engine(self, resident: int | None) -> Engine:
        """Return an engine with the KV of so many layers in memory; of all if None."""
        tiers = None if resident is None else TierSettings(resident_layers=resident, disk=self.args.folder)
        return self.opened.load(tiers=tiers, prompts=self.opened.prompt_cache(PromptFolder(self.prompts, 20 * GIB)))

    def decode(self, engine: Engine, method: str) -> tuple[list[int], float]:
        """Return the tokens, and the seconds of one after the first."""
        found: list[int] = []
        start, config = 0.0, GenerationConfig(max_new_tokens=self.args.new)
        for event in engine.generate(self.ids, Sampling(temperature=0), config, Speculation(method)):
            if isinstance(event, Tokens):
                if not found:
                    start, first = time.perf_counter(), len(event.ids)
                found += event.ids
        return found, (time.perf_counter() - start) / (len(found) - first)


def rows(bench: Bench) -> list[dict[str, Any]]:
    """Return a row for each method."""
    args, found = bench.args, []
    memory = bench.engine(None)
    plain, _ = bench.decode(memory, "ar")
    disk = bench.engine(bench.plan("ar", 1.0).placed.resident_layers)
    for method in args.methods:
        rounds = []
        for _ in range(args.rounds):
            rate = disk_rate(args.folder, QUICK)
            ids, seconds = bench.decode(disk, method)
            plan = bench.plan(method, rate)
            rounds.append((seconds, plan.chosen.tbt.seconds, rate, ids == plain, bench.decode(memory, method)[1]))
        seconds, planned, rate, same, in_memory = zip(*rounds, strict=True)
        row = {"method": method, "ms": 1e3 * statistics.median(seconds), "planned_ms": 1e3 * statistics.median(planned)}
        row["ratio"] = statistics.median(a / b for a, b in zip(seconds, planned, strict=True))
        row |= {
            "memory_ms": 1e3 * statistics.median(in_memory),
            "disk_gb_s": statistics.median(rate),
            "same": all(same),
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    """Measure, print a line for each method, and write the JSON file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk")
    parser.add_argument("--prompts", type=Path, help="a prompt cache to use again")
    parser.add_argument("--host-memory", type=parse_size, default=100 * 10**6)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["ar", "retrieval", "auto"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = rows(Bench(args))
    if args.json:
        facts = {"machine": machine(), "host_memory": args.host_memory, "tokens": args.tokens, "new_tokens": args.new}
        args.json.write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
