"""Compare plain steps of sequences together with the same one after the other: throughput by number of sequences.

    python scripts/bench_batch.py --context 8192

A step of each sequence a pass, over random keys and values; whole methods on a text are `triforce bench --batch`.
Batches are interleaved; medians. `net` leaves out what a hypervisor stole meanwhile, the most of any core. Threads are
those of OMP_NUM_THREADS. `--cpu-time` counts what one thread computes instead, on machines whose cores are shared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cpu_clock  # before offload
import torch
from bench_peers import machine

from offload import EngineConfig, open_model
from offload.batching.batch import Batch
from offload.batching.lane import Lane
from offload.kernels.native import torch_on_one_thread
from offload.model.decoder import Model
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.steps import AT_ONCE

TICKS = 100  # a second, of /proc/stat


def stolen() -> list[float]:
    """Return the seconds that the hypervisor has taken from each core, of those that are counted."""
    if cpu_clock.IN_USE:
        return [0.0]
    lines = Path("/proc/stat").read_text("ascii").splitlines()
    return [int(line.split()[8]) / TICKS for line in lines if line.startswith("cpu") and line[3].isdecimal()]


class Clock:
    """Seconds from its creation to `stop`: on the wall, and net of what was stolen."""

    def __init__(self) -> None:
        self._stolen, self._started = stolen(), time.perf_counter()

    def stop(self) -> tuple[float, float]:
        wall = time.perf_counter() - self._started
        return wall, wall - max(b - a for a, b in zip(self._stolen, stolen(), strict=True))


Rate = tuple[float, float]  # tokens a second of all sequences: by the wall, and net


def filled(model: Model, context: int, room: int, rows: torch.Tensor) -> Runner:
    """Return a runner whose cache repeats `rows` of keys and values until it has `context` tokens."""
    cache, shape = model.new_cache(context + room), model.shape
    while cache.length < context:
        size, start = min(len(rows), context - cache.length), cache.length
        cache.begin(size)
        parts = rows[:size].split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        for layer in range(shape.layers):
            cache.store.append(layer, start, *parts, cache.rope.rows(start, start + size))
        cache.commit()
    runner = Runner(model, cache)
    runner._cached = [1] * context
    return runner


def steps(runner: Runner, count: int) -> Callable[[Lane | None], Iterator[None]]:
    """Return what starts `count` greedy steps of a runner in a lane; without one, by itself."""

    def start(lane: Lane | None) -> Iterator[None]:
        runner.executor = AT_ONCE if lane is None else lane
        with torch.inference_mode():
            for _ in range(count):
                runner.logits(runner.step(torch.tensor([5]))).argmax()
                runner.resolve([5])
        yield from ()

    return start


def plain_rate(runners: list[Runner], context: int, count: int) -> Rate:
    """Return the throughput of `count` plain steps of each runner together."""
    for runner in runners:
        runner.truncate(context)
    clock = Clock()
    if len(runners) == 1:
        list(steps(runners[0], count)(None))
    else:
        list(Batch(len(runners)).run((key, steps(each, count)) for key, each in enumerate(runners)))
    wall, net = clock.stop()
    return len(runners) * count / wall, len(runners) * count / net


def table(rates: dict[int, list[Rate]]) -> str:
    """Return the median rates, and their ratios to one after the other."""
    lines = ["| together | tokens/s | ratio | net tokens/s | net ratio |", "| ---: | ---: | ---: | ---: | ---: |"]
    medians = {
        size: [statistics.median(column) for column in zip(*found, strict=True)] for size, found in rates.items()
    }
    first = medians[min(medians)]
    for size, (wall, net) in medians.items():
        lines.append(f"| {size} | {wall:.1f} | {wall / first[0]:.2f} | {net:.1f} | {net / first[1]:.2f} |")
    return "\n".join(lines)


def measure(runners: list[Runner], options: argparse.Namespace) -> dict[int, list[Rate]]:
    """Return the rates at each size; the first round does not count, and none begins after `options.seconds`."""
    rates: dict[int, list[Rate]] = {size: [] for size in options.batch}
    end = time.perf_counter() + options.seconds
    for turn in range(options.repeats + 1):
        if turn > 1 and time.perf_counter() > end:
            break
        for size in options.batch:
            found = plain_rate(runners[:size], options.context, options.steps)
            if turn:
                rates[size].append(found)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=32, help="tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=5, help="rounds at most")
    parser.add_argument("--seconds", type=float, default=60, help="after which no round begins")
    parser.add_argument(cpu_clock.OPTION, action="store_true", help="count the seconds that one thread computes")
    options = parser.parse_args()
    opened = open_model(EngineConfig(options.model, "cpu"))
    print(f"{machine()}, kernel {opened.kernel}; {options.context:,} tokens, {options.steps} steps", flush=True)
    model = opened.load().model
    rows = torch.randn(512, model.shape.heads + 2 * model.shape.kv_heads, model.shape.head_dim).to(model.dtype)
    runners = [filled(model, options.context, options.steps + 1, rows) for _ in range(max(options.batch))]
    with torch_on_one_thread(model.operations.kernel):
        print(table(measure(runners, options)))


if __name__ == "__main__":
    main()
