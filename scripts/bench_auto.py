"""Compare `auto` with plain decoding and with every fixed method, over a matrix of texts. Ratios from one process.

    python scripts/bench_auto.py --contexts 8192 --texts new --temperatures 0
    python scripts/bench_auto.py --quick
    python scripts/bench_auto.py --links 0 0.25 --repeats 5 --json out.json
    python scripts/bench_auto.py --links 0 --texts new --kv packed --methods retrieval retrieval:plane auto:plane

A cell is a temperature, a text, a context (prompt and answer, in tokens) and a link: 0 keeps all KV in memory, another
number streams it at so many GB/s over a simulated link. The texts ask about the same book: to continue it (`new`), to
summarise it (`summary`), to repeat a passage word for word (`quoting`). Prompts come from the prompt cache: the first
run of a context prefills it, which takes minutes at 32K; `--prefill` does only that. A run with the `--json` file of
an interrupted one goes on with the cells that are missing.

The methods are interleaved, so that drift of the machine's speed affects all. Every run selects the retrieval cache
anew, as a first request does. A figure is the median over the repeats of seconds a token after the first; a ratio is of
rates. Wanted: at least 0.97 of plain decoding and 0.90 of the best fixed method in every cell, and 0.95 of the best in
the geometric mean. `claimed` is the speed-up that `auto` reports of itself. `--cpu-time` counts what one thread
computes, on machines whose cores are shared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import cpu_clock  # before offload
from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings
from offload.prompt_cache.folder import PromptFolder
from offload.settings.kv_formats import full_formats

ROOT = Path(__file__).parents[1]
FAST = 1e12  # bytes a second: no limit
FIXED = ("lookup", "retrieval", "triforce", "streaming")
TASKS = {
    "new": "Continue the story. Write the next chapter.",
    "summary": "Summarise the text above.",
    "quoting": "Repeat the following text word for word, three times: {passage}",
}


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix; `link` is in GB/s, 0 for KV in memory."""

    context: int
    text: str
    temperature: float
    link: float

    def __str__(self) -> str:
        where = f"{self.link:g} GB/s" if self.link else "memory"
        return f"{self.context:>6} {self.text:8} T={self.temperature:<3g} {where:9}"


@dataclass
class Result:
    """Seconds a token of every method, and the speed-ups that `auto` reports, a value for each repeat.

    `drafts` are those of the last run of `auto`.
    """

    cell: Cell
    seconds: dict[str, list[float]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    new_tokens: int = 0
    claimed: list[float] = field(default_factory=list)

    def rate(self, method: str) -> float:
        """Return the median rate of a method in tokens a second."""
        return 1 / statistics.median(self.seconds[method])

    @property
    def best(self) -> str:
        """The fixed method with the highest rate, plain decoding included."""
        return max((method for method in self.seconds if method != "auto"), key=self.rate)

    @property
    def ratios(self) -> tuple[float, float]:
        """The rate of `auto`, of plain decoding's and of the best fixed method's."""
        return self.rate("auto") / self.rate("ar"), self.rate("auto") / self.rate(self.best)


class Bench:
    """An engine for one context and kind of link, with a prompt cache."""

    def __init__(self, options: argparse.Namespace, context: int, link: float) -> None:
        config = EngineConfig(model=options.model, dtype=options.dtype, kv=options.kv)
        opened = open_model(config, speculation=Speculation())
        opened = opened.stretched(context)
        loaded = opened.load()
        prompts = opened.prompt_cache(PromptFolder(options.cache.expanduser()))
        self._link = SimulatedLink(FAST) if link else None
        stores = None
        if self._link is not None:
            model = loaded.model
            stores = TieredStoreFactory(model.operations, model.device, TierSettings("stream"), self._link)
        # Without end-of-sequence tokens: all methods emit equally many.
        self.engine = Engine(loaded.model, (), 512, stores=stores, prompts=prompts)
        self._bandwidth, self._new = link * 1e9, options.new
        book = options.prompt_file.read_text("utf-8")
        self.prompts = {name: prompt(opened.tokenizer, book, context - options.new, TASKS[name]) for name in TASKS}

    def prefill(self, text: str) -> None:
        """Run the prompt of a text, or take it from the prompt cache, without a limit on the link."""
        if self._link is not None:
            self._link.bandwidth = FAST
        self._run(text, Sampling(temperature=0), 0, Speculation("ar"), new=1)
        if self._link is not None:
            self._link.bandwidth = self._bandwidth

    def timed(self, text: str, sampling: Sampling, seed: int, settings: Speculation) -> tuple[float, Speculated]:
        """Return the seconds a token after the first, and the last statistics of the levels."""
        for use in ("middle", "alternative"):
            self.engine.idle_session.runners.kept.pop(use, None)  # a first request has no retrieval cache yet
        return self._run(text, sampling, seed, settings, self._new)

    def _run(self, text: str, sampling: Sampling, seed: int, settings: Speculation, new: int):
        generation = GenerationConfig(max_new_tokens=new, seed=seed)
        first = last = emitted = 0
        state = None
        self.engine.reserve(len(self.prompts[text]) + self._new)
        for event in self.engine.generate(self.prompts[text], sampling, generation, settings):
            if isinstance(event, Tokens):
                last = time.perf_counter()
                first = first or last
                emitted += len(event.ids)
            elif isinstance(event, Speculated):
                state = event
        return (last - first) / max(emitted - 1, 1), state


def prompt(tokenizer, book: str, tokens: int, task: str) -> list[int]:
    """Return a prompt of nearly `tokens` tokens: the beginning of a book, and then a task."""
    ids = tokenizer.encode(book[: 8 * tokens], special_tokens=False)
    body, passage = (tokenizer.decode(part) for part in (ids[: tokens - 160], ids[tokens // 4 : tokens // 4 + 60]))
    return tokenizer.chat(f"{body}\n\n{task.format(passage=passage)}", None)[:tokens]


def measure(bench: Bench, cell: Cell, options: argparse.Namespace) -> Result:
    """Run all methods of a cell in turn, `options.repeats` times."""
    bench.prefill(cell.text)
    result = Result(cell, new_tokens=options.new)
    for seed, method in itertools.product(range(options.repeats), options.methods):
        name, _, middle = method.partition(":")
        settings = Speculation(name, budget=options.budget, middle=middle or None)
        seconds, state = bench.timed(cell.text, Sampling(temperature=cell.temperature), seed, settings)
        result.seconds.setdefault(method, []).append(seconds)
        if method == "auto":
            result.claimed += [] if state.gain is None else [state.gain.speedup]
            result.drafts = {
                f"{row.drafter} -> {row.verifier}": [row.verifications, row.drafted, row.accepted]
                for row in state.levels
            }
    times = ", ".join(f"{name} {1e3 / result.rate(name):.1f}" for name in result.seconds)
    print(f"{cell}  ms a token: {times}; {result.drafts}", file=sys.stderr, flush=True)
    return result


def results(options: argparse.Namespace, known: Container[Cell]) -> Iterator[Result]:
    """Measure the chosen cells that are not known; the model is loaded once for every context and link."""
    for context, link in itertools.product(options.contexts, options.links):
        cells = [Cell(context, *each, link) for each in itertools.product(options.texts, options.temperatures)]
        cells = [cell for cell in cells if cell not in known]
        bench = Bench(options, context, link) if cells else None
        for cell in cells:
            if options.prefill:
                bench.prefill(cell.text)
            else:
                yield measure(bench, cell, options)


def table(rows: list[Result]) -> str:
    """Format the results: rates of plain decoding, of the best fixed method, and the ratios of `auto` to them."""
    head = f"{'cell':34} {'plain ms':>9} {'auto ms':>8} {'best fixed':>16} {'auto/plain':>11}"
    lines = [f"{head} {'claimed':>8} {'auto/best':>10}"]
    for row in rows:
        to_plain, to_best = row.ratios
        claimed = f"{statistics.median(row.claimed):.2f}" if row.claimed else "-"
        plain, auto, best = (1e3 / row.rate(name) for name in ("ar", "auto", row.best))
        lines.append(
            f"{row.cell!s:34} {plain:9.1f} {auto:8.1f} {row.best:>10} {best:5.1f} {to_plain:11.2f} "
            f"{claimed:>8} {to_best:10.2f}"
        )
    means = [math.exp(statistics.fmean(math.log(row.ratios[i]) for row in rows)) for i in (0, 1)]
    lines.append(f"{'geometric mean':34} {'':9} {'':8} {'':16} {means[0]:11.2f} {'':8} {means[1]:10.2f}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--texts", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--links", type=float, nargs="+", default=[0.0, 0.25], help="GB/s; 0 is KV in memory")
    more = "beside plain and auto; one with another middle level is retrieval:streaming"
    parser.add_argument("--methods", nargs="*", default=list(FIXED), help=more)
    parser.add_argument("--kv", choices=full_formats(), default=EngineConfig().kv)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--quick", action="store_true", help="2K in memory, 64 new tokens, one repeat")
    parser.add_argument("--prefill", action="store_true", help="only fill the prompt cache")
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/triforce/bench-prompts"))
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budget", type=int, default=Speculation().budget)
    parser.add_argument("--json", type=Path, metavar="FILE", help="cells that it has are not measured again")
    parser.add_argument(cpu_clock.OPTION, action="store_true", help="count the seconds that one thread computes")
    options = parser.parse_args()
    if options.quick:
        options.contexts, options.links, options.new, options.repeats = [2048], [0.0], 64, 1
    options.methods = ["ar", *options.methods, "auto"]
    return options


def main() -> None:
    options = parse()
    rows = read(options.json)
    for row in results(options, {row.cell for row in rows}):
        rows.append(row)
        if options.json:
            facts = {"machine": machine(), "results": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(facts, indent=2) + "\n")
    if rows:
        print(f"{machine()}{', CPU time of one thread' if cpu_clock.IN_USE else ''}\n{table(rows)}")


def read(path: Path | None) -> list[Result]:
    """Return the results of an earlier run, which are not measured again."""
    if path is None or not path.exists():
        return []
    rows = json.loads(path.read_text())["results"]
    return [Result(**row | {"cell": Cell(**row["cell"])}) for row in rows]


if __name__ == "__main__":
    main()
