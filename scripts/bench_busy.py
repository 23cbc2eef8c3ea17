"""Measure how much slower triforce is beside another busy process. Ratios from one run, plain decoding and prefill.

    python scripts/bench_busy.py                        quiet against one busy process
    python scripts/bench_busy.py --against OTHER/TREE   the same for another checkout, in turns with this one
    python scripts/bench_busy.py --processes            two copies side by side, and two ranks, against one copy

The busy process is an endless loop that the script starts itself; the machine should have nothing else to do. Each run
prefills another part of a book, and then decodes it greedily.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
WANTED = 1.5  # times the quiet figure, at most


@dataclass
class Figures:
    """The measurements of all runs of one condition."""

    rates: list[float] = field(default_factory=list)  # prefilled tokens a second, a run
    gaps: list[float] = field(default_factory=list)  # milliseconds between tokens, all runs

    def add(self, rate: float, gaps: list[float]) -> None:
        self.rates.append(rate)
        self.gaps += gaps

    @property
    def summary(self) -> tuple[float, float, float]:
        """Median and 95th percentile of milliseconds a token, and the median of milliseconds a prefilled token."""
        ordered = sorted(self.gaps)
        p95 = ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
        return statistics.median(ordered), p95, 1e3 / statistics.median(self.rates)


class Measured:
    """One checkout in a process of its own, which measures a run for each line that it reads."""

    def __init__(self, tree: Path, options: argparse.Namespace, ranks: int = 1) -> None:
        self._children = []
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        for rank in range(ranks):
            environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            if ranks > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                environment |= {"MASTER_PORT": port}
                environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
            command = [sys.executable, __file__, "--child", "--new", str(options.new), "--chars", str(options.chars)]
            self._children.append(
                subprocess.Popen(
                    [*command, "--prompt-file", str(options.prompt_file), "--model", options.model],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        self.result()  # loaded, and one run to warm up

    def start(self, run: int) -> None:
        for child in self._children:
            print(run, file=child.stdin, flush=True)

    def result(self) -> tuple[float, list[float]]:
        """Wait for the run; return the first rank's prefill rate in tokens/s, and its milliseconds between tokens."""
        found = [child.stdout.readline() for child in self._children]
        if not all(found):
            sys.exit("a measured process has ended: see its message above")
        rate, gaps = json.loads(found[0])
        print(f"  {rate:.0f} tokens/s of prefill, {statistics.median(gaps):.1f} ms a token", file=sys.stderr)
        return rate, gaps

    def run(self, run: int) -> tuple[float, list[float]]:
        self.start(run)
        return self.result()

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def serve(options: argparse.Namespace) -> None:
    """Load the model, then measure a run for each number on stdin, and print it as a line of JSON."""
    import torch

    from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
    from offload.parallel.process_group import Ranks

    group = {"group": Ranks(torch.device("cpu"))} if "RANK" in os.environ else {}
    opened = open_model(EngineConfig(model=options.model, device="cpu"), speculation=Speculation("ar"), **group)
    engine = opened.load().without_end()
    text = options.prompt_file.read_text("utf-8")

    def measure(run: int) -> None:
        start = run * options.chars % (len(text) - options.chars)
        ids = opened.tokenizer.encode(text[start : start + options.chars], special_tokens=True)
        times = [time.perf_counter()]
        generation = GenerationConfig(max_new_tokens=options.new)
        for event in engine.generate(ids, Sampling(temperature=0), generation, Speculation("ar")):
            if isinstance(event, Tokens):
                times.append(time.perf_counter())
        gaps = [1e3 * (after - before) for before, after in pairwise(times)]
        print(json.dumps([1e3 * len(ids) / gaps[0], gaps[1:]]), flush=True)

    measure(0)
    for line in sys.stdin:
        measure(int(line))


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        time.sleep(0.3)  # until the scheduler knows it
        yield
    finally:
        process.kill()
        process.wait()


def quiet_and_busy(options: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Measure each checkout quiet and beside a busy process, all in turns."""
    trees = {"this": ROOT} | ({"other": options.against.resolve()} if options.against else {})
    measured = {name: Measured(tree, options) for name, tree in trees.items()}
    found = {name: {"quiet": Figures(), "busy": Figures()} for name in trees}
    for run in range(1, options.repeats + 1):
        for name, process in measured.items():
            found[name]["quiet"].add(*process.run(2 * run))
            with busy_process():
                found[name]["busy"].add(*process.run(2 * run + 1))
    for process in measured.values():
        process.close()
    return found


def side_by_side(options: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Measure one copy, two copies at the same time, and two ranks of one copy, in turns."""
    one, two = Measured(ROOT, options), Measured(ROOT, options)
    found = {name: Figures() for name in ("one copy", "two copies")}
    for run in range(1, options.repeats + 1):
        found["one copy"].add(*one.run(3 * run))
        one.start(3 * run + 1)
        two.start(3 * run + 2)
        for process in (one, two):
            found["two copies"].add(*process.result())
    one.close()
    two.close()
    ranks, found["two ranks"] = Measured(ROOT, options, 2), Figures()
    for run in range(1, options.repeats + 1):
        found["two ranks"].add(*ranks.run(3 * run))
    ranks.close()
    return {"this": found}


def show(name: str, found: dict[str, Figures]) -> None:
    """Print a row for each condition, and its ratios to the first one."""
    first = next(iter(found.values())).summary
    print(f"{name:12} {'ms a token':>11} {'p95':>7} {'prefill/s':>10}   times the first row's")
    for condition, figures in found.items():
        median, p95, prefill = figures.summary
        ratios = [mine / base for mine, base in zip(figures.summary, first, strict=True)]
        row = f"{condition:12} {median:11.1f} {p95:7.1f} {1e3 / prefill:10.0f}"
        print(row + "   " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--chars", type=int, default=6000, help="of the prompt")
    parser.add_argument("--new", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout of this repository")
    parser.add_argument("--processes", action="store_true", help="two copies and two ranks, not a busy process")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.child:
        serve(options)
        return
    print(f"{options.chars:,} characters of prompt, {options.new} tokens, {os.cpu_count()} processors", flush=True)
    found = side_by_side(options) if options.processes else quiet_and_busy(options)
    for name, figures in found.items():
        show(name, figures)
    if not options.processes:
        ratios = [b / q for q, b in zip(*(found["this"][each].summary for each in ("quiet", "busy")), strict=True)]
        print(f"wanted: {WANTED:.2f} at most; {'met' if max(ratios) <= WANTED else 'not met'}")
    if options.json:
        rows = {name: {each: asdict(row) for each, row in figures.items()} for name, figures in found.items()}
        options.json.write_text(json.dumps(rows, indent=2), "utf-8")


if __name__ == "__main__":
    main()
