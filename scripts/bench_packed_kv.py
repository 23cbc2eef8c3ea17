"""Compare attention over packed keys and values (12 bits, and plane A alone) with the same over plain blocks.

    python scripts/bench_packed_kv.py
    python scripts/bench_packed_kv.py --level avx2 --readers 2 --heads 32 --kv-heads 8 --head-dim 128 --layers 1

Attention of some layers over random keys and values, which are more than the caches hold; bits are compared. With
`--readers`, so many processes read memory meanwhile: on the same processors, or with `--processors` on the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from bench_peers import machine
from torch import Tensor

from offload.architecture.dims import Dimensions
from offload.kernels.native import Kernel, find_kernel
from offload.kernels.native.calls import BlockCalls
from offload.kernels.native.kv_groups import Groups, kv_format
from offload.kernels.native.layout import write_blocks
from offload.kernels.native.packed_kv import RUN_BLOCKS, pack_call
from offload.kernels.native.structs import BLOCK
from offload.kernels.native.threads import torch_on_one_thread
from offload.settings.kv_formats import PACKED_KV

READ_BYTES = 256 << 20
FORMATS = ("plain", "packed", "plane")
HEADER = f"{'':9}{'readers':>8}{'rows':>6}{'plain':>11}{'packed':>11}{'plane':>11}{'packed':>9}{'plane':>8} of plain"


class Layer:
    """Random keys and values of one layer, as blocks and packed; 128 to 255 of the newest tokens are not packed."""

    def __init__(self, kernel: Kernel, shape: Dimensions, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (shape.kv_heads, tokens, shape.head_dim)
        keys, values = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
        blocks = -(-tokens // BLOCK)
        self.blocks = torch.zeros(shape.kv_heads, blocks, 2 * BLOCK * shape.head_dim, dtype=torch.bfloat16)
        write_blocks(self.blocks, shape.head_dim, torch.arange(tokens), keys, values)
        runs = tokens // PACKED_KV.run - 1
        self.runs = torch.zeros(shape.kv_heads, runs, PACKED_KV.run_bytes(shape.head_dim), dtype=torch.uint8)
        heads, numbers = (
            x.reshape(-1, 1) for x in torch.meshgrid(*map(torch.arange, self.runs.shape[:2]), indexing="ij")
        )
        items = torch.cat((heads, numbers, numbers * RUN_BLOCKS + torch.arange(RUN_BLOCKS)), dim=1).int()
        fits = torch.zeros(len(items), dtype=torch.uint8)
        start = time.perf_counter()
        kernel.pack_runs(pack_call(self.blocks, self.runs, items, fits))
        self.pack_seconds = time.perf_counter() - start
        self.table = torch.arange(blocks, dtype=torch.int32).repeat(shape.kv_heads, 1)
        for head, run, *own in items[fits.bool()].tolist():
            self.table[head, own] = ~torch.arange(run * RUN_BLOCKS, (run + 1) * RUN_BLOCKS, dtype=torch.int32)
        self.packed_share = float(fits.float().mean())

    def groups(self, kind: str) -> Groups | None:
        """Return the packed runs as the kernel takes them, or None for plain blocks."""
        return None if kind == "plain" else Groups(self.runs, kv_format(kind))


def attention(
    kernel: Kernel, shape: Dimensions, layer: Layer, rows: int, kind: str
) -> tuple[Callable[[], None], Tensor]:
    """Return a function that attends with the last `rows` tokens of a layer, and the output that it writes."""
    blocks = layer.blocks.shape[1]
    q = torch.randn(rows, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    table, out = None if kind == "plain" else layer.table, torch.zeros_like(q)
    seen = blocks * BLOCK - rows + 1
    call = BlockCalls(shape, blocks).attention(layer.blocks, q, seen, table=table, out=out, groups=layer.groups(kind))
    return partial(kernel.attend, call, q, out), out


def _read(processors: set[int], ready: Event, stop: Event) -> None:
    os.sched_setaffinity(0, processors)
    torch.set_num_threads(1)
    numbers = torch.ones(READ_BYTES // 4)
    ready.set()
    while not stop.is_set():
        numbers.sum()


@contextmanager
def readers(count: int, processors: set[int]) -> Iterator[None]:
    """Have processes read memory on some processors until the end of the block."""
    context = multiprocessing.get_context("spawn")
    stop, started = context.Event(), [context.Event() for _ in range(count)]
    processes = [context.Process(target=_read, args=(processors, ready, stop), daemon=True) for ready in started]
    for process, ready in zip(processes, started, strict=True):
        process.start()
        ready.wait()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join()


def measure(kernel: Kernel, shape: Dimensions, layers: list[Layer], rows: int, repeats: int) -> dict[str, float]:
    """Return milliseconds a layer in each format, and how many times as fast as plain the others are. Compares bits.

    Formats take turns layer by layer. Times are lower quartiles, which other programs disturb less than medians.
    """
    runs = [{kind: attention(kernel, shape, layer, rows, kind) for kind in FORMATS} for layer in layers]
    times: dict[str, list[float]] = {kind: [] for kind in FORMATS}
    for _ in range(repeats):
        for each in runs:
            for kind, (run, _) in each.items():
                start = time.perf_counter()
                run()
                times[kind].append(time.perf_counter() - start)
    if not all(torch.equal(each["plain"][1], each["packed"][1]) for each in runs):
        raise SystemExit("bench_packed_kv: the bits differ")
    quartiles = {kind: statistics.quantiles(x, n=4)[0] for kind, x in times.items()}
    speedups = {f"{kind}_speedup": quartiles["plain"] / quartiles[kind] for kind in FORMATS[1:]}
    return {f"{kind}_ms": x * 1e3 for kind, x in quartiles.items()} | speedups


def describe(shape: Dimensions, layers: list[Layer]) -> str:
    """Return what is read, and what of it is packed."""
    plain, packed = (sum(getattr(x, name).nbytes for x in layers) for name in ("blocks", "runs"))
    share = PACKED_KV.number_bits(shape.head_dim) / 16
    return (
        f"{layers[0].blocks.shape[1] * BLOCK:,} tokens, {shape.heads} heads, {shape.kv_heads} of keys and values, of "
        f"{shape.head_dim} dimensions, {len(layers)} layers: {plain / 1e6:.0f} MB plain, {packed / 1e6:.0f} MB packed, "
        f"a run {share:.3f} of plain; {statistics.mean(x.packed_share for x in layers):.1%} of runs fit; "
        f"packing took {sum(x.pack_seconds for x in layers) * 1e9 / (plain / 2):.1f} ns a value"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="query tokens")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--level", nargs="+", default=["auto"], help="of the kernel, such as avx2, or portable")
    parser.add_argument("--readers", type=int, nargs="+", default=[0], help="processes that read memory meanwhile")
    parser.add_argument(
        "--processors", type=int, help="that attention runs on, the readers on the others (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    everywhere = os.sched_getaffinity(0)
    own = set(sorted(everywhere)[: options.processors or len(everywhere)])
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))
    width = options.heads * options.head_dim
    shape = Dimensions(1, width, options.heads, options.kv_heads, options.head_dim, width, 256, True)
    layers = [Layer(find_kernel(), shape, options.tokens, seed) for seed in range(options.layers)]
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}\n{describe(shape, layers)}\n{HEADER}")
    table = []
    for level, count in product(options.level, options.readers):
        kernel = find_kernel(level)
        where = everywhere - own or everywhere
        if count:
            print(
                f"beside {count} processes that read {READ_BYTES >> 20} MiB each over and over, on processors {where}"
            )
        with readers(count, where), torch_on_one_thread(kernel):
            for rows in options.rows:
                found = measure(kernel, shape, layers, rows, options.repeats)
                table.append({"level": kernel.level, "readers": count, "rows": rows} | found)
                times = "".join(f"{found[f'{kind}_ms']:8.2f} ms" for kind in FORMATS)
                speedups = f"{found['packed_speedup']:9.2f}{found['plane_speedup']:8.2f}"
                print(f"{kernel.level:9}{count:8}{rows:6}{times}{speedups}", flush=True)
    if options.json:
        found = {"machine": machine(), "processors": sorted(own), "about": describe(shape, layers), "rows": table}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
