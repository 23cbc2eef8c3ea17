"""Compare sequences decoded together with the same one after the other: throughput by number of sequences.

    python scripts/bench_batch.py plain --context 8192
    python scripts/bench_batch.py methods --context 2048 --book examples/frankenstein.txt --cache /tmp/prompts

`plain`: a step of each sequence a pass, over random keys and values. `methods`: the engine continues another part of a
book for each sequence, plainly and by `auto`; the clock runs from when all have begun to when the first has finished.
Prompts are cached in a folder, so a second run reads none. Batches are interleaved; medians. `net` leaves out what a
hypervisor stole meanwhile, the most of any core. Threads are those of OMP_NUM_THREADS. `--cpu-time` counts what one
thread computes instead, on machines whose cores are shared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import cpu_clock  # before offload
import torch
from bench_peers import machine

from offload import EngineConfig, Finished, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.api.opened_model import OpenModel
from offload.batching.batch import Batch, Failed
from offload.batching.lane import Lane
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.kernels.native import torch_on_one_thread
from offload.model.decoder import Model
from offload.prompt_cache.folder import PromptFolder
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.steps import AT_ONCE

TICKS = 100  # a second, of /proc/stat
GREEDY = Sampling(temperature=0)


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


def method_rate(engine: Engine, prompts: list[list[int]], method: str, count: int, size: int) -> Rate:
    """Return the throughput of the engine over all prompts, `size` of them together."""
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    emitted, wall, net = map(sum, zip(*(decoded(engine, group, method, count) for group in groups), strict=True))
    return emitted / wall, emitted / net


def decoded(engine: Engine, prompts: list[list[int]], method: str, count: int) -> tuple[int, float, float]:
    """Return the tokens of these prompts together while all of them decode, and the seconds: by the wall, and net."""
    config, settings = GenerationConfig(max_new_tokens=count), Speculation(method=method)
    requests = [BatchRequest(key, ids, GREEDY, config, settings) for key, ids in enumerate(prompts)]
    begun: set[int] = set()
    emitted, clock = 0, None
    with closing(engine.generate_batch(requests, len(requests))) as events:
        for key, event in events:
            if isinstance(event, Tokens):
                emitted += len(event.ids) if clock else 0
                begun.add(key)
                if clock is None and len(begun) == len(prompts):
                    clock = Clock()
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished) and clock:
                return emitted, *clock.stop()
    raise SystemExit("error: one sequence ended before all had begun; hint: more --steps")


def table(rates: dict[str, dict[int, list[Rate]]]) -> str:
    """Return the median rates, and their ratios to one after the other."""
    lines = [
        "| method | together | tokens/s | ratio | net tokens/s | net ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, sizes in rates.items():
        medians = {
            size: [statistics.median(column) for column in zip(*found, strict=True)] for size, found in sizes.items()
        }
        first = medians[min(medians)]
        for size, (wall, net) in medians.items():
            lines.append(
                f"| {method} | {size} | {wall:.1f} | {wall / first[0]:.2f} | {net:.1f} | {net / first[1]:.2f} |"
            )
    return "\n".join(lines)


def measure(
    contenders: dict[str, Callable[[int], Rate]], sizes: list[int], repeats: int, seconds: float
) -> dict[str, dict[int, list[Rate]]]:
    """Return the rates of each contender at each size; the first round does not count.

    No round begins after so many seconds.
    """
    rates: dict[str, dict[int, list[Rate]]] = {name: {size: [] for size in sizes} for name in contenders}
    end = time.perf_counter() + seconds
    for turn in range(repeats + 1):
        if turn > 1 and time.perf_counter() > end:
            break
        for size in sizes:
            for name, rate in contenders.items():
                found = rate(size)
                if turn:
                    rates[name][size].append(found)
    return rates


def book_prompts(opened: OpenModel, book: Path, context: int, count: int) -> list[list[int]]:
    """Return `count` prompts of `context` tokens each, from different places of a book."""
    ids = opened.tokenizer.encode(book.read_text("utf-8"), special_tokens=False)
    step = (len(ids) - context) // max(count - 1, 1)
    return [ids[start : start + context] for start in range(0, step * count, step)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "methods"])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence; methods: with its answer")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=32, help="tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=5, help="rounds at most")
    parser.add_argument("--seconds", type=float, default=60, help="after which no round begins")
    parser.add_argument("--methods", nargs="+", default=["ar", "auto"])
    parser.add_argument("--book", type=Path, default=Path(__file__).parents[1] / "examples" / "frankenstein.txt")
    parser.add_argument("--cache", type=Path, default=Path("prompts"), help="folder for the prompts")
    parser.add_argument(cpu_clock.OPTION, action="store_true", help="count the seconds that one thread computes")
    options = parser.parse_args()
    opened = open_model(EngineConfig(options.model, "cpu"))
    print(f"{machine()}, kernel {opened.kernel}; {options.context:,} tokens, {options.steps} steps", flush=True)
    most = max(options.batch)
    if options.what == "plain":
        model = opened.load().model
        rows = torch.randn(512, model.shape.heads + 2 * model.shape.kv_heads, model.shape.head_dim).to(model.dtype)
        runners = [filled(model, options.context, options.steps + 1, rows) for _ in range(most)]
        contenders = {"plain": lambda size: plain_rate(runners[:size], options.context, options.steps)}
        with torch_on_one_thread(model.operations.kernel):
            print(table(measure(contenders, options.batch, options.repeats, options.seconds)))
        return
    engine = opened.load(prompts=opened.prompt_cache(PromptFolder(options.cache)))
    engine.eos_ids = frozenset()  # all sequences have as many tokens
    prompts = book_prompts(opened, options.book, options.context - options.steps, most)
    contenders = {
        name: lambda size, name=name: method_rate(engine, prompts, name, options.steps, size)
        for name in options.methods
    }
    print(table(measure(contenders, options.batch, options.repeats, options.seconds)))


if __name__ == "__main__":
    main()
