"""Measure the gain of speculation, of overlap and of host attention with a streamed KV cache. Ratios from one process.

    python scripts/bench_offload.py
    python scripts/bench_offload.py --prompt-tokens 4000 --experiment overlap --json out.json

The link is simulated, so this runs without a GPU. `speculation`: all KV is streamed at 0.25 GB/s (the ratio of link to
computation that an RTX 4090 has with a model of 7 billion weights), greedy; every method against plain streamed
decoding, and whether the output is the same. `overlap`: a link on which the copies of a step take as long as its
computation, with prefetch and without. `hybrid`: host attention as fast as the link; streaming alone, host attention
alone, and both. The prompt is prefilled once, over a fast link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.memory.balance import Balance
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings
from offload.memory.tiered_factory import TieredStoreFactory
from offload.sequence import common_prefix

ROOT = Path(__file__).parents[1]
FAST = 1e12  # bytes a second: no limit
GREEDY = Sampling(temperature=0)
METHODS = ("lookup", "retrieval", "streaming", "triforce", "auto")


class Bench:
    """An engine with a streamed full cache, whose link and host attention can be throttled."""

    def __init__(self, args: argparse.Namespace) -> None:
        opened = open_model(EngineConfig(model=args.model, device="cpu", dtype=args.dtype))
        loaded = opened.load()
        self.link = SimulatedLink(FAST)
        self.stores = Recording(loaded.model.operations, loaded.model.device, TierSettings("hybrid"), self.link)
        self.engine = Engine(loaded.model, (), 512, stores=self.stores)
        self.prompt = opened.tokenizer.encode(args.text.read_text("utf-8"), special_tokens=True)[: args.prompt_tokens]
        self.dtype = loaded.model.dtype
        self.place("stream")
        self.decode("ar", args.new)  # prefills the prompt and reserves the tokens that the measurements add

    @property
    def tiers(self):
        return self.stores.store.tiers

    def place(self, mode: str, share: float | None = None, overlap: bool = True, bandwidth: float = FAST) -> None:
        """Set the mode, the host's share, prefetch and the bandwidth of link and host attention (bytes a second)."""
        self.link.bandwidth = bandwidth
        if self.stores.store is not None:
            tiers = self.tiers
            tiers.ring._overlap = overlap
            tiers.ring.drop()
            tiers.balance = Balance({"stream": 0.0, "host": 1.0}.get(mode, share))
            tiers.host._bandwidth = bandwidth if bandwidth < FAST else None

    def decode(self, method: str, new: int, **settings) -> tuple[list[int], float]:
        """Return the new tokens, and the seconds per token after the first event."""
        ids, times = [], []
        generation = GenerationConfig(max_new_tokens=new)
        for event in self.engine.generate(self.prompt, GREEDY, generation, Speculation(method, **settings)):
            if isinstance(event, Tokens):
                ids += event.ids
                times.append((time.perf_counter(), len(ids)))
        (first, before), (last, after) = times[0], times[-1]
        return ids, (last - first) / (after - before)

    def bytes(self) -> int:
        """Return the bytes of the prompt's keys and values."""
        return self.engine.model.shape.kv_bytes(len(self.prompt), self.dtype.itemsize)


class Recording(TieredStoreFactory):
    """A store factory that keeps a reference to the last store it made."""

    store = None

    def new_store(self, *args):
        self.store = super().new_store(*args)
        return self.store


def speculation(bench: Bench, args: argparse.Namespace) -> dict:
    """Compare every method with plain decoding, all KV streamed."""
    bench.place("stream", bandwidth=args.bandwidth * 1e9)
    plain, seconds = bench.decode("ar", args.new)
    rows = {"ar": {"ms": 1e3 * seconds, "speedup": 1.0, "same": True}}
    print(f"speculation, {args.bandwidth} GB/s: ar {1e3 * seconds:.0f} ms a token", flush=True)
    for method in args.methods:
        runs = [bench.decode(method, args.new, budget=args.budget, gamma2=args.gamma2) for _ in range(args.repeats)]
        found, took = runs[0][0], statistics.median(run[1] for run in runs)
        same = all(run[0] == plain for run in runs)
        rows[method] = {"ms": 1e3 * took, "speedup": seconds / took, "same": same}
        where = "" if same else f", differs behind {common_prefix(found, plain, len(plain))} tokens"
        print(f"  {method:10} {1e3 * took:6.0f} ms a token, {seconds / took:5.2f} of plain{where}", flush=True)
    return rows


def overlap(bench: Bench, args: argparse.Namespace) -> dict:
    """Compare decoding with and without prefetch on a link as slow as the computation."""
    bench.place("stream")
    compute = statistics.median(bench.decode("ar", 16)[1] for _ in range(args.repeats))
    bandwidth = bench.bytes() / compute
    found = interleaved(
        args.repeats,
        on=lambda: (bench.place("stream", bandwidth=bandwidth), bench.decode("ar", 16)[1])[1],
        off=lambda: (bench.place("stream", overlap=False, bandwidth=bandwidth), bench.decode("ar", 16)[1])[1],
    )
    print(f"overlap, {bandwidth / 1e9:.2f} GB/s: compute {1e3 * compute:.0f} ms, ", end="")
    print(f"on {1e3 * found['on']:.0f}, off {1e3 * found['off']:.0f}: {found['off'] / found['on']:.2f}", flush=True)
    return {"compute": compute, "bandwidth": bandwidth, "gain": found["off"] / found["on"], **found}


def hybrid(bench: Bench, args: argparse.Namespace) -> dict:
    """Compare streaming, host attention and both, where the first two are equally fast."""
    bandwidth = args.bandwidth * 1e9
    found = interleaved(
        args.repeats,
        **{
            mode: lambda mode=mode: (bench.place(mode, bandwidth=bandwidth), bench.decode("ar", 16)[1])[1]
            for mode in ("stream", "host", "hybrid")
        },
    )
    gain = min(found["stream"], found["host"]) / found["hybrid"]
    print(f"hybrid, {args.bandwidth} GB/s each: ", end="")
    print(", ".join(f"{mode} {1e3 * took:.0f} ms" for mode, took in found.items()) + f": {gain:.2f}", flush=True)
    return {"gain": gain, **found}


def interleaved(repeats: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Return the median of each function over interleaved runs, so that drift of the machine's speed affects all."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(run())
    return {name: statistics.median(taken) for name, taken in samples.items()}


EXPERIMENTS = {"speculation": speculation, "overlap": overlap, "hybrid": hybrid}


def main() -> int:
    """Run the experiments, print the results, and write the JSON file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=128, help="tokens of a run of `speculation`")
    parser.add_argument("--bandwidth", type=float, default=0.25, help="GB/s")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--gamma2", type=int, help="tokens drafted for a verification; adaptive if left out")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experiment", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    print(f"{len(bench.prompt):,} tokens, {bench.bytes() / 1e6:.0f} MB of KV; {machine()}", flush=True)
    results = {name: EXPERIMENTS[name](bench, args) for name in args.experiment}
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "prompt_tokens": len(bench.prompt), **results}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
