"""Measure the gain of overlap and of host attention with a streamed KV cache. Ratios from one process.

    python scripts/bench_offload.py
    python scripts/bench_offload.py --prompt-tokens 4000 --experiment overlap --json out.json

The link is simulated, so this runs without a GPU; whole methods over it are `triforce bench --offload stream --link`.
`overlap`: a link on which the copies of a step take as long as its computation, with prefetch and without. `hybrid`:
host attention as fast as the link; streaming alone, host attention alone, and both. The prompt is prefilled once, over
a fast link. `packed`: passes over 1 and 8 tokens with packed pages and with pages as they are. `planes`: drafts from
plane A of packed pages, on the device, beside selected chunks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.events import Speculated
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


def packed(bench: Bench, args: argparse.Namespace) -> dict:
    """Compare passes over pages packed without loss with passes over pages as they are, on a slow link."""
    model, ids = bench.engine.model, torch.tensor(bench.prompt)
    bench.engine.release()
    runs, blocks = {}, len(ids) // 128 * 128
    start = blocks - 128
    for kv in ("bf16", "packed"):
        link = SimulatedLink(FAST)
        stores = TieredStoreFactory(model.operations, model.device, TierSettings("stream"), link, kv=kv)
        store = stores.new_store(model.shape.full_attention, blocks, model.dtype)
        cache = model.new_cache(blocks, model.rope(len(ids)), store)
        if runs:
            before = runs["bf16", 1].args[0]
            cache.restore(start, before.dump(0, start))
        else:
            for part in ids[:start].split(512):
                model.forward(part, cache)
        model.forward(ids[start : start + 1], cache)  # the last page is open
        link.bandwidth = args.bandwidth * 1e9
        runs |= {(kv, rows): partial(one_pass, cache, model, ids[start : start + rows]) for rows in (1, 8)}
    found = interleaved(args.repeats * 3, **{f"{kv}, {rows} rows": run for (kv, rows), run in runs.items()})
    for kv in ("bf16", "packed"):
        tiers = runs[kv, 1].args[0].store.tiers
        tiers.ring.drop()  # waits for what is under way, which must not outlive the interpreter
    print(f"packed, {args.bandwidth} GB/s: ", end="")
    print(", ".join(f"{name} {1e3 * took:.0f} ms" for name, took in found.items()), end="")
    gains = {rows: found[f"bf16, {rows} rows"] / found[f"packed, {rows} rows"] for rows in (1, 8)}
    print(": " + ", ".join(f"{gain:.2f} for {rows} rows" for rows, gain in gains.items()), flush=True)
    return {"gain": gains[1], "gain of 8 rows": gains[8], **found}


def planes(bench: Bench, args: argparse.Namespace) -> dict:
    """Compare drafts from plane A with selected chunks and with plain decoding, all of packed pages on a slow link."""
    model = bench.engine.model
    bench.engine.release()
    engines, links = {}, {}
    for mode in ("stream", "planes"):
        links[mode] = SimulatedLink(FAST)
        stores = TieredStoreFactory(model.operations, model.device, TierSettings(mode), links[mode], kv="packed")
        engines[mode] = Engine(model, (), 512, stores=stores)
        generate(engines[mode], bench.prompt, PLAIN, links[mode])  # reads the prompt
        links[mode].bandwidth = args.bandwidth * 1e9
    drafting = Speculation("retrieval")
    cases = {"plain": ("stream", PLAIN), "retrieval": ("stream", drafting), "plane": ("planes", drafting)}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    for _ in range(args.repeats + 1):
        for name, (mode, settings) in cases.items():
            found[name].append(generate(engines[mode], bench.prompt, settings, links[mode]))
    columns = ("s a token", "bytes a verification", "tokens a verification", "accepted")
    result = {
        name: dict(zip(columns, map(statistics.median, zip(*runs[1:], strict=True)), strict=True))
        for name, runs in found.items()
    }
    print(f"planes, {args.bandwidth} GB/s:")
    for name, each in result.items():
        print(
            f"  {name:9} {1e3 * each['s a token']:6.1f} ms a token, {each['bytes a verification'] / 1e6:6.1f} MB and ",
            end="",
        )
        print(
            f"{each['tokens a verification']:4.1f} tokens a verification, {each['accepted']:.3f} accepted", flush=True
        )
    return result


def generate(engine: Engine, prompt: list[int], settings: Speculation, link: SimulatedLink) -> tuple[float, ...]:
    """Return seconds and bytes of an answer by token and by verification, tokens by verification, and acceptance."""
    times, counts, sent, levels = [], [], [], ()
    for event in engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=4 * NEW), settings):
        if isinstance(event, Tokens):
            times.append(time.perf_counter())
            counts.append(len(event.ids))
            sent.append(link.statistics.bytes)
        elif isinstance(event, Speculated):
            levels = event.levels
    passes, tokens = len(times) - 1, sum(counts[1:])
    verified = sum(level.verified for level in levels)
    accepted = sum(level.accepted for level in levels) / max(verified, 1)
    return (times[-1] - times[0]) / tokens, (sent[-1] - sent[0]) / passes, tokens / passes, accepted


def one_pass(cache, model, ids) -> float:
    """Return the seconds of a pass over tokens behind what is cached, of three in a row behind another one."""
    start = 0.0
    for at in range(4):
        start = time.perf_counter() if at == 1 else start
        cache.truncate(cache.length // 128 * 128)
        model.forward(ids, cache)
    return (time.perf_counter() - start) / 3


def interleaved(repeats: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Return the median of each function over interleaved runs, so that drift of the machine's speed affects all."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(run())
    return {name: statistics.median(taken) for name, taken in samples.items()}


EXPERIMENTS = {"overlap": overlap, "hybrid": hybrid, "packed": packed, "planes": planes}


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
