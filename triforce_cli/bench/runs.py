"""Runs what a cell measures once: a method on one prompt, several sequences together, or one after the other."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

from rich.text import Text

from offload.batching.batch import Failed
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import TriforceError
from offload.events import Prefilled, Tokens
from offload.metrics import Meter, Summary
from offload.settings.config import Speculation
from offload.settings.generation import FASTEST
from offload.settings.method_sizes import has_draft_model, tree_nodes

from ..output.progress import ProgressDisplay, RunFacts
from ..output.statistics import quantized_warning
from ..output.status_line import StatusLine
from ..output.terminal import Terminal
from .benchmark import Benchmark
from .compared import BASE
from .peer import Peer, Task
from .positions import Positions
from .report import BY_PAIR, mean_of

_MEANS = ("tbt_median_s", "tbt_p95_s", "tokens_per_verification")
_BY_KEY = (*BY_PAIR, "time_share", "mask_s")
MEASURED = ("tokens_per_s", *_MEANS, "verifications", *_BY_KEY, "total_s")
UNKEPT = ("tbt_s", "nodes", "seconds")  # measured for the report of this run alone


class Run(NamedTuple):
    """The measures of a run by name, those of MEASURED and more, and the tokens of each sequence."""

    measured: dict[str, Any]
    outputs: list[list[int]]


@contextmanager
def run_status(terminal: Terminal, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text on stderr unless `quiet`, and erase the last one in the end.

    It is drawn once a run: a spinner would take time from what is measured.
    """
    status = StatusLine(terminal)

    def show(text: str) -> None:
        status.clear()
        if not quiet:
            status.refresh(lambda: Text(text))

    try:
        yield show
    finally:
        status.clear()


def memory_of(benchmark: Benchmark) -> dict[str, int]:
    """Return the bytes of each method beside the model's weights: KV caches, and a draft model where it uses one."""
    found = {}
    for name, method in benchmark.speculations.items():
        draft = benchmark.model.draft if has_draft_model(method) else None
        need = replace(benchmark.model, speculation=method, draft=draft).estimate(benchmark.length)
        found[name] = need.kv + need.retrieval + need.draft
    return found


def warn_of_quantized_weights(
    benchmark: Benchmark, engine: Engine, display: ProgressDisplay, terminal: Terminal
) -> float | None:
    """Warn of quantised weights; return how often they choose as the original ones, None if there are none."""
    level = benchmark.settings.engine.quantize
    if level is None:
        return None
    display.loading(f"comparing {level} with the original weights")
    agreement = benchmark.model.agreement(engine.model, benchmark.ids)
    display.hide()
    terminal.warn(quantized_warning(level, agreement))
    return agreement


def read_prompt(benchmark: Benchmark, engine: Engine, display: ProgressDisplay) -> Meter:
    """Read the prompt into the caches that all runs share; return its times."""
    meter = Meter(len(benchmark.ids))
    context = benchmark.model.checkpoint.shape.context
    names, tokens = (benchmark.settings.engine.model, BASE), lambda: engine.model.pass_tokens
    display.start(RunFacts(*names, context, meter, pass_tokens=tokens))
    # The session gets room for the largest tree of all methods.
    widest = max(benchmark.speculations.values(), key=tree_nodes)
    method = replace(benchmark.speculations[BASE], tree=widest.tree)
    with closing(engine.generate(benchmark.ids, benchmark.sampling, benchmark.config, method)) as events:
        for event in meter.watch(events):
            display.event(event)
            if isinstance(event, Prefilled) and event.done == event.total:
                break
    display.hide()
    return meter


def run_once(benchmark: Benchmark, engine: Engine, method: Speculation, prefill_s: float) -> Run:
    """Generate once. The prompt is in the caches but for its last token, whose time is in `prefill_s` already."""
    meter, positions = Meter(len(benchmark.ids)), Positions()
    with closing(engine.generate(benchmark.ids, benchmark.sampling, benchmark.config, method)) as events:
        for _ in positions.watch(meter.watch(events)):
            pass
    summary = meter.summary("length", method=method.method)
    more = {
        "ttft_s": prefill_s + (summary.ttft_s or 0) - (summary.prefill_s or 0),
        "tbt_s": meter.gaps,
        "nodes": _nodes(summary),
        "draft_positions": positions.in_draft,
        "answer_positions": positions.in_answer,
    }
    return Run({name: getattr(summary, name) for name in MEASURED} | more, [list(meter.ids)])


def run_peer(benchmark: Benchmark, peer: Peer, expected: Sequence[int] | None) -> Run:
    """Let another program generate once. What it fails with is the measure `error`."""
    config = benchmark.config
    nothing: dict[str, Any] = {name: {} for name in _BY_KEY}
    task = Task(benchmark.ids, config.max_new_tokens, benchmark.sampling, config.seed or 0, expected)
    measured: dict[str, Any] = dict.fromkeys((*MEASURED, "ttft_s", "memory_bytes", "other_load_cores")) | nothing
    try:
        answer = peer.run(task)
    except TriforceError as error:
        return Run(measured | {"error": error.message, "sampling": FASTEST}, [[]])
    # Its draws are of other random numbers.
    is_compared = answer.is_comparable and benchmark.sampling.greedy
    more = answer.measured | ({} if is_compared else {"sampling": FASTEST})
    return Run(measured | more, [answer.tokens])


def run_in_turn(benchmark: Benchmark, engine: Engine, prompts: Sequence[list[int]], method: Speculation) -> Run:
    """Generate for each prompt alone, and read it first: what batches are compared with."""
    meters, started = [], time.perf_counter()
    for ids in prompts:
        engine.forget()  # the beginning of an earlier prompt is read again
        meters.append(meter := Meter(len(ids)))
        with closing(engine.generate(ids, benchmark.sampling, benchmark.config, method)) as events:
            for _ in meter.watch(events):
                pass
    total_s = time.perf_counter() - started
    engine.release()
    tokens, seconds = sum(len(meter.gaps) for meter in meters), sum(sum(meter.gaps) for meter in meters)
    summaries = [meter.summary("length", method=method.method) for meter in meters]
    return Run(_of_all(summaries, tokens, seconds, total_s), [list(meter.ids) for meter in meters])


def run_together(benchmark: Benchmark, engine: Engine, prompts: Sequence[list[int]], method: Speculation) -> Run:
    """Generate for all prompts in a batch; its rate is that of all, while all of them decode."""
    meters = [Meter(len(ids)) for ids in prompts]
    found: list[list[tuple[float, int]]] = [[] for _ in prompts]  # when how many tokens came
    outputs: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    requests = [BatchRequest(key, ids, benchmark.sampling, benchmark.config, method) for key, ids in enumerate(prompts)]
    with closing(engine.generate_batch(requests, len(prompts))) as events:
        for key, event in events:
            if isinstance(event, Failed):
                raise event.error
            meters[key].observe(event)
            if isinstance(event, Tokens) and event.ids:
                found[key].append((time.perf_counter(), len(event.ids)))
                outputs[key] += event.ids
    total_s = time.perf_counter() - started
    first, last = max(times[0][0] for times in found), min(times[-1][0] for times in found)
    tokens = sum(count for times in found for at, count in times if first < at <= last)
    summaries = [meter.summary("length", method=method.method) for meter in meters]
    return Run(_of_all(summaries, tokens, max(last - first, 0.0), total_s), outputs)


def _of_all(summaries: Sequence[Summary], tokens: int, seconds: float, total_s: float) -> dict[str, Any]:
    """Return the measures of several sequences: the rate of all, sums, and means over the sequences."""
    passes = [each.verifications for each in summaries if each.verifications is not None]
    return {
        "tokens_per_s": tokens / seconds if tokens and seconds > 0 else None,
        "seconds": seconds,
        "total_s": total_s,
        "verifications": sum(passes) or None,
        **{name: mean_of(getattr(each, name) for each in summaries) for name in _MEANS},
        **{name: _by_key([getattr(each, name) for each in summaries]) for name in _BY_KEY},
    }


def _by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: mean(part[key] for part in parts if key in part) for key in keys}


def _nodes(summary: Summary) -> float | None:
    """Return the nodes of a tree, over all drafters; None without trees."""
    counts = [(each["verifications"], each["nodes"]) for each in summary.trees.values()]
    return sum(count * nodes for count, nodes in counts) / sum(count for count, _ in counts) if counts else None
