"""Measure the gain of overlap and of host attention with a streamed KV cache. Ratios from one process.

    python scripts/bench_offload.py
    python scripts/bench_offload.py --prompt-tokens 4000 --experiment overlap --json out.json

The link is simulated, so this runs without a GPU; whole methods over it are `triforce bench --offload stream --link`.
`overlap`: a link on which the copies of a step take as long as its computation, with prefetch and without. `hybrid`:
host attention as fast as the link; streaming alone, host attention alone, and both. The prompt is prefilled once, over
a fast link.
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
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_attention import Balance
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings

ROOT = Path(__file__).parents[1]
FAST = 1e12  # bytes a second: no limit
GREEDY, PLAIN = Sampling(temperature=0), Speculation("ar")
NEW = 16  # tokens of a run


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
        self.decode()  # prefills the prompt and reserves the tokens that the measurements add

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

    def decode(self) -> float:
        """Return the seconds per token of plain decoding."""
        times = []
        for event in self.engine.generate(self.prompt, GREEDY, GenerationConfig(max_new_tokens=NEW), PLAIN):
            if isinstance(event, Tokens):
                times.append(time.perf_counter())
        return (times[-1] - times[0]) / (len(times) - 1)

    def bytes(self) -> int:
        """Return the bytes of the prompt's keys and values."""
        return self.engine.model.shape.kv_bytes(len(self.prompt), self.dtype.itemsize)


class Recording(TieredStoreFactory):
    """A store factory that keeps a reference to the last store it made."""

    store = None

    def new_store(self, *args):
        self.store = super().new_store(*args)
        return self.store


def overlap(bench: Bench, args: argparse.Namespace) -> dict:
    """Compare decoding with and without prefetch on a link as slow as the computation."""
    bench.place("stream")
    compute = statistics.median(bench.decode() for _ in range(args.repeats))
    bandwidth = bench.bytes() / compute
    found = interleaved(
        args.repeats,
        on=lambda: (bench.place("stream", bandwidth=bandwidth), bench.decode())[1],
        off=lambda: (bench.place("stream", overlap=False, bandwidth=bandwidth), bench.decode())[1],
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
            mode: lambda mode=mode: (bench.place(mode, bandwidth=bandwidth), bench.decode())[1]
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


EXPERIMENTS = {"overlap": overlap, "hybrid": hybrid}


def main() -> int:
    """Run the experiments, print the results, and write the JSON file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--bandwidth", type=float, default=0.25, help="GB/s")
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
