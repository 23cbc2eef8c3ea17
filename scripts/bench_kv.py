"""Compare quantised keys and values with bf16 ones: time of attention, and of steps from disk.

    python scripts/bench_kv.py attention --tokens 8192
    python scripts/bench_kv.py disk --tokens 8192 --disk /mnt/nvme

`attention`: of all layers over random keys and values, runs interleaved, medians. `disk`: a step of the model with all
keys and values in a file, likewise; a disk's rate may change from one second to the next. What the rounding does to a
model's answers is `triforce bench --quality --modes kv=q8,kv=q4`. Threads are those of OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from bench_kernels import attention, fill, medians
from bench_peers import machine

from offload import EngineConfig, open_model
from offload.caches.full import FullCache
from offload.memory.factory import TieredStoreFactory
from offload.memory.tier_settings import TierSettings
from offload.model.decoder import Model
from offload.prompt_cache.fingerprint import TOKENS as PROMPT_BLOCK
from offload.settings.config import EXACT


def bench_attention(model: Model, kinds: list[str], tokens: int, rows: list[int], repeats: int) -> None:
    """Print milliseconds of attention in all layers for each format and number of query tokens."""
    caches = {}
    for kind in kinds:
        model.kv = kind
        caches[kind] = model.new_cache(tokens + max(rows))
        fill(caches[kind], tokens)
    print(f"{'tokens':>8}{'rows':>6}" + "".join(f"{kind:>10}" for kind in kinds) + "   ratios to the first")
    for count in rows:
        runs = {kind: attention(cache, count) for kind, cache in caches.items()}
        found = medians(runs, repeats, model.operations.kernel)
        ratios = " ".join(f"{found[kinds[0]] / found[kind]:.2f}" for kind in kinds[1:])
        print(
            f"{tokens:8}{count:6}" + "".join(f"{1e3 * found[kind]:7.1f} ms" for kind in kinds) + f"   {ratios}",
            flush=True,
        )


def bench_disk(model: Model, kinds: list[str], tokens: int, folder: Path, repeats: int) -> None:
    """Print milliseconds of a step with all keys and values on disk, and the bytes that it reads, for each format."""
    runs, links = {}, {}
    for kind in kinds:
        factory = TieredStoreFactory(model.operations, model.device, TierSettings(disk=folder), kv=kind)
        store = factory.new_store(model.shape, tokens + 1, model.dtype)
        cache, model.kv = model.new_cache(tokens + 1, store=store), kind
        source = model.new_cache(2 * PROMPT_BLOCK)
        fill(source, 2 * PROMPT_BLOCK)
        for start in range(0, tokens, PROMPT_BLOCK):
            at = min(start, PROMPT_BLOCK)
            cache.restore(PROMPT_BLOCK, source.store.dump(at, at + PROMPT_BLOCK))
        runs[kind], links[kind] = partial(_step, model, cache), factory.link
    before = {kind: link.statistics.bytes for kind, link in links.items()}
    found = medians(runs, repeats, model.operations.kernel)
    for kind in kinds:
        size = (links[kind].statistics.bytes - before[kind]) / (2 * (repeats + 1))
        print(f"{kind:6} {1e3 * found[kind]:7.1f} ms, {size / 1e6:.1f} MB", flush=True)


def _step(model: Model, cache: FullCache) -> None:
    model.forward(torch.tensor([5]), cache)
    cache.truncate(cache.length - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "disk"])
    parser.add_argument("--kv", nargs="+", default=["q8", "q4", "fp8"])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--disk", type=Path, default=Path("."), help="a folder on the disk")
    options = parser.parse_args()
    opened = open_model(EngineConfig(options.model, "cpu"))
    model, kinds = opened.load().model, [EXACT, *options.kv]
    print(f"{machine()}, kernel {opened.kernel}")
    if options.what == "attention":
        bench_attention(model, kinds, options.tokens, options.rows, options.repeats)
    else:
        bench_disk(model, kinds, options.tokens, options.disk, options.repeats)


if __name__ == "__main__":
    main()
