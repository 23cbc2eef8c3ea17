#!/usr/bin/env python3
"""Compare `auto` with plain decoding and with every fixed method, over a matrix of texts. Ratios from one process.

    python scripts/bench_auto.py --contexts 8192 --texts new --temperatures 0
    python scripts/bench_auto.py --links 0 0.25 --repeats 5 --json out.json

A cell is a context (prompt and answer, in tokens), a link (0 keeps all KV in memory, another number streams it at so
many GB/s over a simulated link), a text and a temperature. The texts ask about the same book: to continue it (`new`),
to summarise it (`summary`), to repeat a passage word for word (`quoting`). Prompts come from the prompt cache: the
first run of a context reads it, which takes minutes at 32K. Methods are interleaved, and every run selects the
retrieval cache anew, as a first request does. A figure is the median over the repeats of seconds a token after the
first. Wanted: at least 0.97 of plain decoding, and 0.95 of the best fixed method in the geometric mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path

from bench_peers import machine

from offload import EngineConfig, GenerationConfig, Sampling, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import SimulatedLink
from offload.memory.tier_settings import TierSettings
from offload.prompt_cache.folder import PromptFolder

ROOT = Path(__file__).parents[1]
FAST = 1e12  # bytes a second: no limit
TASKS = {
    "new": "Continue the story. Write the next chapter.",
    "summary": "Summarise the text above.",
    "quoting": "Repeat the following text word for word, three times: {passage}",
}


class Bench:
    """An engine for one context and link (GB/s; 0 for KV in memory), with a prompt cache."""

    def __init__(self, options: argparse.Namespace, context: int, link: float) -> None:
        config = EngineConfig(model=options.model, kv=options.kv)
        opened = open_model(config, speculation=Speculation()).stretched(context)
        model = opened.load().model
        self._link = SimulatedLink(FAST) if link else None
        tiers = TierSettings("stream")
        stores = TieredStoreFactory(model.operations, model.device, tiers, self._link) if self._link else None
        prompts = opened.prompt_cache(PromptFolder(options.cache.expanduser()))
        self._engine = Engine(model, (), 512, stores=stores, prompts=prompts)  # no token ends it
        self._bandwidth, self._new = link * 1e9, options.new
        book = options.prompt_file.read_text("utf-8")
        self._prompts = {name: prompt(opened.tokenizer, book, context - options.new, TASKS[name]) for name in TASKS}

    def read(self, text: str) -> None:
        """Read the prompt of a text, or take it from the prompt cache, without a limit on the link."""
        if self._link is not None:
            self._link.bandwidth = FAST
        self._run(text, Sampling(temperature=0), 0, Speculation("ar"), 1)
        if self._link is not None:
            self._link.bandwidth = self._bandwidth

    def timed(self, text: str, temperature: float, seed: int, settings: Speculation) -> float:
        """Return the seconds a token after the first."""
        self._engine.idle_session.runners.kept.pop("middle", None)  # a first request has no retrieval cache yet
        return self._run(text, Sampling(temperature=temperature), seed, settings, self._new)

    def _run(self, text: str, sampling: Sampling, seed: int, settings: Speculation, new: int) -> float:
        self._engine.reserve(len(self._prompts[text]) + self._new)
        generation, times, emitted = GenerationConfig(max_new_tokens=new, seed=seed), [], 0
        for event in self._engine.generate(self._prompts[text], sampling, generation, settings):
            if isinstance(event, Tokens):
                times.append(time.perf_counter())
                emitted += len(event.ids)
        return (times[-1] - times[0]) / max(emitted - 1, 1)


def prompt(tokenizer, book: str, tokens: int, task: str) -> list[int]:
    """Return a prompt of nearly `tokens` tokens: the beginning of a book, and then a task."""
    ids = tokenizer.encode(book[: 8 * tokens], special_tokens=False)
    body, passage = (tokenizer.decode(part) for part in (ids[: tokens - 160], ids[tokens // 4 : tokens // 4 + 60]))
    return tokenizer.chat(f"{body}\n\n{task.format(passage=passage)}", None)[:tokens]


def measure(bench: Bench, text: str, temperature: float, options: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds a token of each method, run in turn."""
    bench.read(text)
    seconds: dict[str, list[float]] = {}
    for seed, method in itertools.product(range(options.repeats), ["ar", *options.methods, "auto"]):
        name, _, middle = method.partition(":")
        settings = Speculation(name, budget=options.budget, middle=middle or None)
        seconds.setdefault(method, []).append(bench.timed(text, temperature, seed, settings))
    return {method: 1e3 * statistics.median(each) for method, each in seconds.items()}


def line(cell: tuple, found: dict[str, float]) -> str:
    """Return a row of the table: times of plain decoding, of `auto` and of the best fixed method, and the ratios."""
    context, link, text, temperature = cell
    best = best_of(found)
    where = f"{link:g} GB/s" if link else "memory"
    ratios = f"{found['ar'] / found['auto']:11.2f} {found[best] / found['auto']:10.2f}"
    times = f"{found['ar']:9.1f} {found['auto']:8.1f} {best:>14} {found[best]:6.1f}"
    return f"{context:>6} {where:9} {text:8} T={temperature:<4g} {times} {ratios}"


def best_of(found: dict[str, float]) -> str:
    """Return the fastest fixed method, plain decoding included."""
    return min((method for method in found if method != "auto"), key=found.__getitem__)


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--links", type=float, nargs="+", default=[0.0, 0.25], help="GB/s; 0 is KV in memory")
    parser.add_argument("--texts", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    more = "beside plain and auto; one with another middle level is retrieval:streaming"
    parser.add_argument("--methods", nargs="*", default=["lookup", "retrieval", "triforce", "streaming"], help=more)
    parser.add_argument("--kv", default=EngineConfig().kv)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/triforce/bench-prompts"))
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--budget", type=int, default=Speculation().budget)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    head = f"{'plain ms':>9} {'auto ms':>8} {'best fixed':>21} {'plain/auto':>11} {'best/auto':>10}"
    print(f"{machine()}\n{'cell':32} {head}")
    rows = {}
    for context, link in itertools.product(options.contexts, options.links):
        bench = Bench(options, context, link)
        for text, temperature in itertools.product(options.texts, options.temperatures):
            cell = context, link, text, temperature
            rows[cell] = measure(bench, text, temperature, options)
            print(line(cell, rows[cell]), flush=True)
    plain = mean([each["ar"] / each["auto"] for each in rows.values()])
    best = mean([each[best_of(each)] / each["auto"] for each in rows.values()])
    print(f"{'geometric mean':73} {plain:11.2f} {best:10.2f}")
    if options.json:
        found = [{"context, link, text, temperature": cell, "ms": row} for cell, row in rows.items()]
        options.json.write_text(json.dumps({"machine": machine(), "cells": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
