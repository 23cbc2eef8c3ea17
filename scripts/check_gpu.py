#!/usr/bin/env python3
"""Check and measure triforce on a CUDA GPU in six steps of at most seven minutes together.

    scripts/check_gpu.sh                      all steps; the table is printed last
    scripts/check_gpu.sh --device cpu         a rehearsal without a GPU: every step in miniature, three minutes

1 the machine (versions, pinning, the link), 2 kernels against fp64, 3 the tests marked cuda, 4 a book by every method,
5 the headline (Llama-2-7B's shape, 120K tokens in host memory, beside the plan), 6 a long prefill. Each step is a
process with a time limit, and writes each result to results.jsonl at once. TRIFORCE_CHECK_MODEL is the model of step 4,
such as the embedded one's first layers (scripts/small_model.py). The exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from scripts.random_model import VOCAB, write_random_model

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "examples" / "frankenstein.txt"
MOST_ERROR = 1e-2  # of a kernel's result in bf16 against fp64, relative to its norm
TRIFORCE = [sys.executable, "-m", "triforce_cli"]
OPTIONAL = ("gguf", "platformdirs", "greenlet", "llguidance", "prompt_toolkit", "starlette", "uvicorn")


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository and return it with its output."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


class Result(NamedTuple):
    """One measured or checked quantity; `planned` is in the same unit."""

    what: str
    value: float | str
    unit: str = ""
    planned: float | None = None


def timed(run: Callable[[], object], device: str) -> float:
    """Return the median seconds of `run`, by CUDA events on a GPU."""
    times = []
    run()
    if device == "cpu":
        return statistics.median(timeit.repeat(run, number=1, repeat=50))
    for _ in range(50):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def check_machine(device: str) -> Iterator[Result]:
    """Yield versions, the GPU, pinned memory and the rates of copies."""
    yield Result("torch, CUDA", f"{torch.__version__}, {torch.version.cuda}")
    for name in ("triton", "transformers", *OPTIONAL):
        yield Result(name, "installed" if sys.modules.get(name, name) and find_spec(name) else "missing")
    if not any(ROOT.glob("offload/kernels/native/_kernel*")):
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        yield Result("native kernel: build", timeit.timeit(lambda: run_command(build), number=1), "s")
    from offload.kernels.native import find_kernel

    yield Result("native kernel", find_kernel().level)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield Result("GPU", f"{properties.name}, {properties.major}.{properties.minor}")
        yield Result("free memory", torch.cuda.mem_get_info()[0] / 2**30, "GiB")
        query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,clocks.sm", "--format=csv,noheader"]
        yield Result("driver, PCIe, clock", run_command(query).stdout.strip())
    for gib in (1, 4, 16) if device == "cuda" else (0.02,):
        started = time.perf_counter()
        memory = torch.empty(int(gib * 2**30), dtype=torch.uint8, pin_memory=device == "cuda")
        yield Result(f"pin {gib} GiB", gib * 2**30 / 1e9 / (time.perf_counter() - started), "GB/s")
    host = memory[: 2**24]
    there = torch.empty(2**24, dtype=torch.uint8, device=device)
    yield Result("link down, 16 MiB", 2**24 / 1e9 / timed(lambda: there.copy_(host, non_blocking=True), device), "GB/s")
    yield Result("link up, 16 MiB", 2**24 / 1e9 / timed(lambda: host.copy_(there, non_blocking=True), device), "GB/s")
    size = 2**30 if device == "cuda" else 2**24
    source, target = torch.empty((2, size), dtype=torch.uint8, device=device)
    yield Result("device copy, read and written", 2e-9 * size / timed(lambda: target.copy_(source), device), "GB/s")
    if device == "cuda":  # plans of the later steps take these rates
        yield Result("measured rates", run_command([*TRIFORCE, "profile", "--measure", "--save"]).stdout)


def check_kernels(device: str) -> Iterator[Result]:
    """Yield each Triton kernel's error against fp64 and its rate; raises ArithmeticError beyond MOST_ERROR.

    Inputs are random, and uninitialised memory is NaN, so that a number that was not written shows.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    wrong = []
    for name, run, exact, size in (*attention_cases(device), *row_cases(device)):
        error = float((run().double() - exact).norm() / exact.norm())
        wrong += [name] if not error < MOST_ERROR else []
        yield Result(f"{name}: error", error)
        if device == "cuda" and size > 2**24:
            yield Result(name, size / 1e9 / timed(run, device), "GB/s")
    if wrong:
        raise ArithmeticError(f"an error above {MOST_ERROR:g}: {'; '.join(wrong)}")


Case = tuple[str, Callable[[], Tensor], Tensor, int]  # a kernel, its call, the result in fp64, the bytes that it reads


def attention_cases(device: str) -> Iterator[Case]:
    """Yield attention by each kernel at the shapes of Llama-2-7B and Qwen3-8B, 1 to 22 rows, short and long."""
    large = device == "cuda"
    for heads, kv_heads in ((32, 32), (32, 8)) if large else ((4, 2),):
        for count, tokens in itertools.product((4_099, 32_771) if large else (301,), (1, 8, 22) if large else (1, 5)):
            for name, *case in attention_of(device, heads, kv_heads, count, tokens):
                yield f"{name}, {heads}/{kv_heads} heads, {tokens} rows, {count:,} keys", *case


def attention_of(device: str, heads: int, kv_heads: int, count: int, tokens: int) -> Iterator[Case]:
    """Yield attention of the last `tokens` of `count` tokens to all of them, by each kernel."""
    from offload.kernels.kv_groups import dequantize_groups, quantize_groups
    from offload.kernels.triton import accumulate, ops
    from offload.settings.kv_formats import KV_FORMATS, PACKED_KV

    dim = 128 if device == "cuda" else 32
    q = torch.randn(tokens, heads, dim, device=device).bfloat16()
    keys, values = (torch.randn(2, kv_heads, count, dim, device=device) * 0.5).bfloat16()
    exact, size = exact_attention(q, keys, values), 4 * kv_heads * count * dim
    yield "plain", lambda: accumulate.attend_stored(q, keys, values), exact, size

    chunk, slots = 16, (count - tokens) // 16
    table = torch.rand(kv_heads, slots, device=device).argsort(1).to(torch.int32)
    tail, seen = slots * chunk, count - tokens + 1
    yield "chunk table", lambda: accumulate.attend_table(q, keys, values, table, chunk, (seen, tail)), exact, size

    whole = count // 128
    runs = torch.zeros(kv_heads, whole + 1, PACKED_KV.run_bytes(dim), dtype=torch.uint8, device=device)
    room = [torch.nn.functional.pad(x, (0, 0, 0, -count % 128)) for x in (keys, values)]
    fits = ops.pack_runs(*room, runs, 0, whole, whole + 1).view(kv_heads, whole).bool()
    numbers = torch.arange(whole + 1, dtype=torch.int32, device=device).repeat(kv_heads, 1)
    numbers[:, :whole] = torch.where(fits, ~numbers[:, :whole], numbers[:, :whole])
    yield "packed", lambda: accumulate.attend_packed(q, (runs, numbers, *room), seen), exact, size * 3 // 4

    groups = (count - tokens) // 32
    first, rest = ([x[:, part] for x in (keys, values)] for part in (slice(32 * groups), slice(32 * groups, None)))
    codes = quantize_groups(*(x.unflatten(1, (groups, 32)) for x in first))
    rounded = [x.flatten(1, 2) for x in dequantize_groups(codes, dim, torch.float32)]

    def attend_codes() -> Tensor:
        found = accumulate.GroupAccumulator(q, kv_heads)
        found.attend_exact(slice(None), *rest, rest[0].shape[1] - tokens)
        found.attend_groups(slice(None), codes, groups)
        return found.output()

    exact = exact_attention(q, *(torch.cat((a, b.float()), 1) for a, b in zip(rounded, rest, strict=True)))
    yield "q8", attend_codes, exact, kv_heads * groups * KV_FORMATS["q8"].run_bytes(dim)


def exact_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return causal attention in fp64, a KV head at a time: q `[tokens, heads, dim]`, keys `[kv_heads, n, dim]`."""
    tokens, count = len(q), keys.shape[1]
    hidden = torch.ones(tokens, count, dtype=torch.bool, device=q.device).triu(count - tokens + 1)
    outs = []
    for queries, k, v in zip(q.unflatten(1, (len(keys), -1)).unbind(1), keys.double(), values.double(), strict=True):
        scores = torch.einsum("tgd,kd->gtk", queries.double(), k) * q.shape[2] ** -0.5
        outs.append(torch.einsum("gtk,kd->tgd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(outs, 1)


def row_cases(device: str) -> Iterator[Case]:
    """Yield norms, gates and products with quantised weights; of weights several copies, more than a cache holds."""
    from offload.architecture.weight_formats import FORMATS
    from offload.kernels.device_weight import pack_for_device
    from offload.kernels.quantized import QuantizedTensor
    from offload.kernels.triton import row_ops

    hidden, wide, copies = (4096, 11008, 8) if device == "cuda" else (256, 64, 2)
    x = torch.randn(22, hidden, device=device).bfloat16()
    weight = torch.randn(hidden, device=device).bfloat16()
    exact = F.rms_norm(x.double(), (hidden,), weight.double(), 1e-5)
    yield "norm", lambda: row_ops.rms_norm(x, weight, 1e-5), exact, 4 * x.numel()
    first, second = x.double().chunk(2, 1)
    yield "gate", lambda: row_ops.gated(x), F.silu(first) * second, 3 * x.numel()
    for name in ("Q4_K", "Q6_K", "Q8_0"):
        kind = FORMATS[name]
        codes = torch.randint(0, 2**kind.bits, (wide, hidden // 32, 32), dtype=torch.uint8, device=device)
        if kind.bits == 8:
            codes = codes.view(torch.int8)
        sizes = [(wide, hidden // group) for group in (kind.group, 32)]
        if kind.nested:
            scales, minima = (torch.randint(1, 60, size, dtype=torch.int8, device=device) for size in sizes)
            factors = [torch.rand(wide, hidden // 256, device=device).half() * 0.01 for _ in range(2)]
        else:
            scales, minima = (torch.rand(size, device=device).half() * 0.1 for size in sizes)
            factors = [None, None]
        if not kind.has_minimum:
            minima, factors[1] = None, None
        tensor = QuantizedTensor(kind, codes, scales, minima, *factors)
        packed = [pack_for_device([tensor]) for _ in range(copies)]
        values = tensor.dequantized().double()
        for rows in (1, 8, 22):
            some = x[:rows].contiguous()
            y = torch.full((rows, wide), float("nan"), device=device)
            turns = itertools.cycle(packed)

            def multiply(some: Tensor = some, y: Tensor = y, turns: Any = turns) -> Tensor:
                row_ops.product(some, next(turns), None, y, False)
                return y

            size = int(kind.bits_per_weight * wide * hidden / 8)
            yield f"{name}, {rows} rows", multiply, some.double() @ values.T, size


def check_tests(device: str) -> Iterator[Result]:
    """Yield the last line of the tests marked cuda; on a CPU of those of the prefetch ring."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "cuda", "tests"]
    command += ["--timeout", "20"] if find_spec("pytest_timeout") else []
    if device == "cpu":
        command = [*command[:7], "--noconftest", "tests/memory/test_prefetch.py"]
    done = run_command(command)
    lines = done.stdout.strip().splitlines() or ["pytest said nothing"]
    yield Result("tests", lines[-1].strip("= "))
    if done.returncode:
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or lines[-1])


def check_book(device: str) -> Iterator[Result]:
    """Yield the rates of each method on a book, each text verified against plain decoding up to ties."""
    ways = {name: ["--method", name] for name in ("ar", "lookup", "retrieval", "streaming", "triforce", "auto")}
    ways["tree"] = ["--method", "retrieval", "--tree", "auto"]
    for mode in ("stream", "host", "hybrid", "planes"):
        ways[f"retrieval, {mode}"] = [*ways["retrieval"], "--offload", mode, "--resident-layers", "0"]
    ways["packed"] = [*ways["retrieval, stream"], "--kv", "packed"]
    text, new = (BOOK.read_text("utf-8")[:20_000], "64") if device == "cuda" else ("Who writes this letter?", "4")
    if device == "cpu":
        ways = {name: ways[name] for name in ("ar", "auto")}
    ways = {"ar, cpu": [*ways["ar"], "--device", "cpu"]} | ways
    failed, first = [], ""
    for name, options in ways.items():
        model = os.environ.get("TRIFORCE_CHECK_MODEL", "smollm2-135m")
        command = [*TRIFORCE, "generate", "-m", model, text, "--json", "-n", new, "--temperature", "0", "--no-cache"]
        done = run_command([*command, "--verify", "--device", device, *options])
        if done.returncode:
            failed.append(f"{name}: {done.stderr.strip()[-300:]}")
            continue
        events = [json.loads(line) for line in done.stdout.splitlines()]
        answer = "".join(event["text"] for event in events if event["type"] == "text")
        first = first or answer
        note = (
            "" if answer == first else f"; differs from the CPU's by a logit of {cpu_margin(model, text, answer):.3g}"
        )
        yield Result(name, events[-1]["tokens_per_s"] or 0.0, f"tokens/s{note}")
    if failed:
        raise RuntimeError("; ".join(failed))


def cpu_margin(model: str, text: str, answer: str) -> float:
    """Return how much higher the CPU's logit of its own token is than of the answer's, where they first differ."""
    from offload import EngineConfig, Sampling, open_model

    opened = open_model(EngineConfig(model=model, device="cpu"))
    ids, emitted = opened.tokenizer.chat(text, None), opened.tokenizer.encode(answer, False)
    replay = opened.load().replay(ids, emitted, Sampling(temperature=0))
    return replay.divergences[0].margin if replay.divergences else 0.0


def measure(engine: Any, ids: list[int], method: Any, new: int) -> tuple[float, tuple[Any, ...]]:
    """Generate after a prompt that the engine has read; return the seconds a token after the first, and the levels."""
    from offload import GenerationConfig, Sampling, Speculated, Tokens

    first, count, levels = 0.0, 0, ()
    for event in engine.generate(ids, Sampling(temperature=1), GenerationConfig(max_new_tokens=new, seed=1), method):
        if isinstance(event, Tokens):
            count = count + len(event.ids) if first else 0
            last = time.perf_counter()
            first = first or last
        elif isinstance(event, Speculated):
            levels = event.levels
    return (last - first) / max(count, 1), levels


def load(opened: Any, mode: str, ids: list[int], device: str) -> tuple[Any, list[Result]]:
    """Return an engine that has read a prompt, its keys and values all in host memory unless the mode is none."""
    from offload import GenerationConfig, Prefilled, Sampling, TierSettings

    started = time.perf_counter()
    link = None if device == "cuda" else 2.0
    engine = opened.load(tiers=None if mode == "none" else TierSettings(mode, resident_layers=0, link_gb_s=link))
    engine.reserve(len(ids) + 128)
    loaded = time.perf_counter()
    with closing(engine.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=1))) as events:
        next(event for event in events if isinstance(event, Prefilled) and event.done == event.total)
    plan = planned(opened.config.model, len(ids), mode, "ar").get("ttft", {}).get("seconds")
    read = Result(f"{mode}: prefill of {len(ids):,} tokens", time.perf_counter() - loaded, "s", plan)
    return engine, [Result(f"{mode}: load and reserve", loaded - started, "s"), read]


def planned(model: str, tokens: int, mode: str, method: str) -> dict[str, Any]:
    """Return the plan that `triforce profile` makes for this machine; empty if it fails."""
    command = [*TRIFORCE, "profile", "--gpu", "auto", "--model", model, "--context", str(tokens), "--method", method]
    placement = ["--offload", mode, *([] if mode == "none" else ["--resident-layers", "0"])]
    done = run_command([*command, *placement, "--json"])
    return {} if done.returncode else json.loads(done.stdout.splitlines()[-1])["plan"]


def check_headline(device: str) -> Iterator[Result]:
    """Yield ms a token and of each level's passes with 120K tokens in host memory, then on the device, beside plans.

    Text of random weights has no meaning, and so has its acceptance: what is comparable are the times of passes.
    """
    from offload import EngineConfig, Speculation, open_model

    budget = 4096 if (large := device == "cuda") else 256
    with tempfile.TemporaryDirectory() as name:
        target = str(write_random_model(Path(name) / "target", "llama-2-7b" if large else "tiny", device))
        draft = str(write_random_model(Path(name) / "draft", "llama-68m" if large else "tiny", device))
        opened = open_model(EngineConfig(target, device=device), speculation=Speculation("triforce", draft))
        methods = {
            "ar": Speculation("ar"),
            "retrieval": Speculation("retrieval", budget=budget, gamma2=6),
            "triforce": Speculation("triforce", draft, budget=budget, gamma1=2, gamma2=6),
        }
        for mode in ("stream", "hybrid", "none"):
            tokens = 122_880 if large else 1_024
            if mode == "none" and large:  # beside 13.5 GB of weights and what a step needs; 512 KiB a token
                tokens = min(tokens, (torch.cuda.mem_get_info()[1] - 20 * 2**30) // 2**19)
            ids = torch.randint(3, VOCAB, (tokens,)).tolist()
            engine, results = load(opened, mode, ids, device)
            yield from results
            for method, settings in methods.items():
                plan = planned(target, tokens, mode, method) if large and method != "triforce" else {}
                new = 32 if mode == "none" and large else 6 if method == "ar" else 16
                yield from level_times(f"{mode}, {method}", *measure(engine, ids, settings, new), plan.get("chosen"))
            if mode == "stream" and large:  # a trace of some cycles beside the results
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                    measure(engine, ids, methods["triforce"], 3)
                trace.export_chrome_trace("results-trace.json.gz")
            del engine


def level_times(name: str, seconds: float, levels: tuple[Any, ...], plan: dict[str, Any] | None) -> Iterator[Result]:
    """Yield ms a token, and of each level that drafts a verification's and a drafted token's."""
    is_plain = plan is not None and plan["method"] == "ar"
    yield Result(f"{name}: a token", 1e3 * seconds, "ms", is_plain and 1e3 * plan["verify_s"])
    for level in levels:
        if level.drafted:
            what, verify_ms = f"{name}: {level.drafter} -> {level.verifier}", 1e3 * level.verify_s / level.verifications
            yield Result(f"{what}, a verification", verify_ms, "ms", plan and 1e3 * plan["verify_s"])
            draft_ms = plan and 1e3 * plan["draft_s"] / plan["gamma2"]
            yield Result(f"{what}, a drafted token", 1e3 * level.draft_s / level.drafted, "ms", draft_ms)


def check_prefill(device: str) -> Iterator[Result]:
    """Yield the seconds and the peak memory of reading 16K tokens with keys and values offloaded, beside the plan."""
    from offload import EngineConfig, open_model

    large = device == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name) / "model", "llama-3.1-8b" if large else "tiny", device)
        opened = open_model(EngineConfig(str(folder), device=device))
        yield from load(opened, "stream", torch.randint(3, VOCAB, (16_384 if large else 1_024,)).tolist(), device)[1]
        if large:
            yield Result("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


class Step(NamedTuple):
    """A step: its name, its limit in seconds, and what it runs."""

    name: str
    limit: int
    run: Callable[[str], Iterator[Result]]


STEPS = {
    1: Step("machine", 75, check_machine),
    2: Step("kernels", 60, check_kernels),
    3: Step("tests", 45, check_tests),
    4: Step("book", 60, check_book),
    5: Step("headline", 150, check_headline),
    6: Step("prefill", 30, check_prefill),
}


def run_step(number: int, device: str, output: Path) -> int:
    """Run a step in this process and append its results to `output`; return 1 if it failed."""
    started, failure = time.perf_counter(), None
    with output.open("a", encoding="utf-8") as file:

        def write(**fields: object) -> None:
            file.write(json.dumps({"step": number, "at_s": round(time.perf_counter() - started, 2)} | fields) + "\n")
            file.flush()

        try:
            for result in STEPS[number].run(device):
                write(**result._asdict() | {"planned": result.planned or None})
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        write(failure=failure, seconds=round(time.perf_counter() - started, 1))
    return int(failure is not None)


def supervise(number: int, device: str, output: Path) -> None:
    """Run a step in a process of its own; at its limit end the process with all that it has started."""
    command = [sys.executable, str(Path(__file__)), "--step", str(number), "--device", device, "--json", str(output)]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if (device, number) == ("cpu", 2) else {})
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        code = process.wait(STEPS[number].limit)
        failure = f"ended with exit code {code}" if code not in (0, 1) else None
    except subprocess.TimeoutExpired:
        failure = f"took more than {STEPS[number].limit} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if failure:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": number, "failure": failure, "seconds": STEPS[number].limit}) + "\n")


def print_table(output: Path, numbers: list[int]) -> bool:
    """Print the results of the steps; return whether one failed."""
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    failed = False
    for number in numbers:
        own = [row for row in rows if row["step"] == number]
        ends = [row for row in own if "failure" in row] or [{"failure": "did not run", "seconds": 0}]
        failed |= any(row["failure"] for row in ends)
        said = "; ".join(row["failure"] for row in ends if row["failure"]) or "done"
        print(f"{number} {STEPS[number].name}: {said}, {ends[-1]['seconds']} s")
        for row in own:
            if "what" in row:
                value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g}"
                ratio = f"; planned {plan:.4g}: x {row['value'] / plan:.2f}" if (plan := row["planned"]) else ""
                print(f"  {row['what']:60} {value} {row['unit']}{ratio}")
    return failed


def main() -> int:
    """Run the steps that are asked for and print the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=list(STEPS), type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=Path("results.jsonl"), metavar="FILE")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        return run_step(args.step, args.device, args.json)
    args.json.write_text("", "utf-8")
    for number in args.only:
        print(f"step {number}, {STEPS[number].name} ...", file=sys.stderr, flush=True)
        supervise(number, args.device, args.json)
    return int(print_table(args.json, args.only))


if __name__ == "__main__":
    sys.exit(main())
