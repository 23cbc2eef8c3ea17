"""Compare the native kernel with torch's operations and with memory bandwidth. Ratios from one process.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --tokens 8000 --level portable

`attention`: attention of all layers alone, 1 to 16 query tokens over random keys and values. `step`: a whole forward
pass over a cache of such keys and values; its cost does not depend on the text. Each is run
twice in its turn, and the second run counts. Turns are interleaved, so that drift of the machine's speed affects all;
figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from bench_peers import machine

from offload import EngineConfig, open_model
from offload.caches.full import FullCache
from offload.kernels.native import Kernel
from offload.kernels.native.threads import torch_on_one_thread
from offload.model.decoder import Model

Row = dict[str, float | int | str]
ROWS = (1, 2, 4, 8, 16)


def fill(cache: FullCache, tokens: int) -> None:
    """Append random keys and values until the cache has `tokens` tokens, without running attention."""
    store, shape = cache.store, cache.store.shape
    generator = torch.Generator().manual_seed(0)
    while cache.length < tokens:
        size, start = min(512, tokens - cache.length), cache.length
        cache.begin(size)
        rows = cache.rope.rows(start, start + size)
        for layer in range(shape.layers):
            new = torch.randn(size, shape.heads + 2 * shape.kv_heads, shape.head_dim, generator=generator)
            store.append(layer, start, *new.to(store.dtype).split((shape.heads, *[shape.kv_heads] * 2), 1), rows)
        cache.commit()


def medians(contenders: dict[str, Callable[[], None]], repeats: int, kernel: Kernel) -> dict[str, float]:
    """Return the median seconds of each function over interleaved pairs of runs, of which the second counts."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            with torch_on_one_thread(kernel if name == "native" else None):
                run()  # torch's threads spin for a while after another contender's run
                start = time.perf_counter()
                run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(cache: FullCache, rows: int) -> Callable[[], None]:
    """Return a function that runs attention of the last `rows` tokens in every layer."""
    shape, store = cache.store.shape, cache.store
    q = torch.randn(rows, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(1)).to(store.dtype)

    def run() -> None:
        for layer in range(shape.layers):
            store.attend(layer, q, cache.length - rows)

    return run


def step(model: Model, cache: FullCache, rows: int) -> Callable[[], None]:
    """Return a function that runs a forward pass of `rows` tokens with all logits, then truncates the cache."""
    ids = torch.arange(rows) + 1000

    def run() -> None:
        length = cache.length
        model.logits(model.forward(ids, cache))
        cache.truncate(length)

    return run


def measure(kind: str, models: dict[str, Model], caches: dict[str, FullCache], repeats: int) -> None:
    """Print a row for each number of query tokens: times of both, their ratio, and the native share of bandwidth.

    The bandwidth is that of torch's fastest reduction over as many bytes as the keys and values have; its runs are
    interleaved with the others.
    """
    length = min(cache.length for cache in caches.values())
    store = caches["native"].store
    read = torch.ones(store.shape.kv_bytes(length, store.dtype.itemsize) // 4).sum
    first = 0.0
    for rows in ROWS:
        if kind == "attention":
            runs = {"read": read} | {name: attention(cache, rows) for name, cache in caches.items()}
        else:
            runs = {name: step(model, caches[name], rows) for name, model in models.items()}
        found = medians(runs, repeats, models["native"].operations.kernel)
        first = first or found["native"]
        row: Row = {"what": kind, "context": length, "tokens": rows}
        row |= {f"{name}_ms": value * 1e3 for name, value in found.items()}
        row |= {"of_one_token": found["native"] / first, "torch_over_native": found["torch"] / found["native"]}
        if kind == "attention":
            row["bandwidth_share"] = found["read"] / found["native"]
        print(line(row), flush=True)


HEADER = (
    f"{'':10}{'context':>8}{'tokens':>8}{'native':>11}{'torch':>11}{'of T=1':>9}{'torch/native':>14}{'of memory':>11}"
)


def line(row: Row) -> str:
    """Format a row of the table."""
    share = f"{row['bandwidth_share']:10.0%}" if "bandwidth_share" in row else ""
    times = f"{row['native_ms']:8.1f} ms{row['torch_ms']:8.1f} ms"
    ratios = f"{row['of_one_token']:9.2f}{row['torch_over_native']:14.2f}"
    return f"{row['what']:10}{row['context']:8,}{row['tokens']:8}{times}{ratios} {share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8000, 32000], help="lengths of the context")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--level", default="auto", help="of the kernel: avx512, avx2, bf16, neon, portable")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    level = {"native": options.level, "torch": "off"}
    models = {
        name: open_model(EngineConfig(options.model, "cpu", options.dtype, kernel=kernel)).load().model
        for name, kernel in level.items()
    }
    if models["native"].operations.kernel is None:
        sys.exit("bench_kernels: the native kernel is not in use; triforce doctor says why")
    print(f"{machine()}\nkernel {models['native'].operations.kernel.level}\n{HEADER}")
    for tokens in options.tokens:
        caches = {name: model.new_cache(tokens + max(ROWS)) for name, model in models.items()}
        for cache in caches.values():
            fill(cache, tokens)
        for kind in ("attention", "step"):
            measure(kind, models, caches, options.repeats)


if __name__ == "__main__":
    main()
