"""Run the parts of check_gpu.sh, each with a time limit; write the results as JSON and as a Markdown table."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpu_report import Report, Result, hardware
from gpu_rows import Rows, Skipped

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "transformers", "safetensors", "psutil")
Part = Callable[[Rows], Result]  # adds to the rows while it runs, and returns the rest


def main() -> int:
    """Run the parts and print the table; return 1 if a part failed or a measurement is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return complain(f"this Python has no {', '.join(missing)}", "name one that has it: PYTHON=/path/to/python")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return complain(
            "no CUDA GPU is available to torch",
            "run this on a machine that has one, with torch for CUDA; --device cpu tries everything in miniature",
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    report = Report(args.folder, hardware(args.device))
    for name, seconds, run in parts(args.device):
        report.add(name, attempt(name, seconds, run))
    print(report.table())
    return 1 if report.failed else 0


def complain(message: str, hint: str) -> int:
    """Print an error with a hint and return exit code 1."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return 1


def parts(device: str) -> Iterator[tuple[str, int, Part]]:
    """Yield (name, time limit in seconds, function) of each part; together less than 10 minutes."""
    import gpu_experts
    import gpu_long
    import gpu_parts
    import gpu_prefill
    import gpu_quantized
    import gpu_quantized_kv
    import gpu_steps
    import gpu_triforce
    from gpu_machine import Machine

    machine = Machine(device)
    long = gpu_long.LongContext(machine)
    yield "tests", 90, partial(run_tests, device)
    yield "rates", 20, machine.rates
    yield "link", 15, partial(gpu_parts.link_rates, machine)
    yield "overlap", 25, partial(gpu_parts.overlap, machine)
    yield "decoding", 40, partial(gpu_parts.decoding, machine)
    yield "resident steps", 25, partial(gpu_steps.resident_steps, machine)
    yield "quantised linears", 19, partial(gpu_quantized.quantized_linears, machine)
    yield "experts", 19, partial(gpu_experts.experts, machine)
    yield "quantised KV", 40, partial(gpu_quantized_kv.quantised_kv, machine)
    yield "prefill", 60, partial(gpu_prefill.long_prefill, machine)
    with machine.capped():
        yield "long context", 80, long.build
        yield "verification", 75, long.verification
        yield "retrieval", 20, long.retrieval
        yield "triforce", 50, partial(gpu_triforce.triforce, machine, long)


def attempt(name: str, seconds: int, run: Part) -> Result:
    """Return the result of a part, or the reason why it was skipped or failed."""
    print(f"{name}: at most {seconds} s", file=sys.stderr, flush=True)
    start, rows, found = time.perf_counter(), Rows(), {}
    try:
        with limit(seconds), told(rows):
            found = run(rows)
        state = "done"
    except Skipped as reason:
        state = "skipped"
        rows.append(("", state, str(reason)))
    except TimeoutError:
        state = "skipped"
        rows.append(("", state, f"took longer than {seconds} s"))
    except Exception as error:  # the other parts run all the same
        traceback.print_exc()
        state = "failed"
        rows.append(("", state, f"{type(error).__name__}: {error}".splitlines()[0][:200]))
    seconds = round(time.perf_counter() - start, 1)
    return {"state": state, "seconds": seconds, "rows": rows, "comparisons": rows.comparisons, "off": rows.off, **found}


@contextmanager
def told(rows: Rows) -> Iterator[None]:
    """Add a line for each distinct warning that something runs slower than it could, such as steps without graphs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            texts = [str(each.message) for each in caught if each.category.__name__ == "Degraded"]
            for text in dict.fromkeys(texts):
                rows.add("warning", "", text.splitlines()[0][:200])


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after `seconds`. A call that blocks in the driver is not interrupted."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_tests(device: str, rows: Rows) -> Result:
    """Run the tests marked cuda under torch's sanitizer or, without a GPU, the tests of the link that need none."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("there is no pytest")
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in file.read_text("utf-8")]
    remark = ""
    if absent := [name for name in ("platformdirs", "gguf") if importlib.util.find_spec(name) is None]:
        files = [ROOT / "tests" / "offloading" / "test_cuda_tiers.py"]
        remark = f"only test_cuda_tiers.py: missing {', '.join(absent)}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", *map(str, files)]
    if device == "cpu":
        command[-len(files) - 2 :] = ["--noconftest", str(ROOT / "tests" / "offloading" / "test_cuda_link.py")]
    sanitized = os.environ | ({"TORCH_CUDA_SANITIZER": "1"} if device == "cuda" else {})
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=sanitized)
    print(run.stdout, run.stderr, sep="\n", file=sys.stderr)
    if run.returncode:
        lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join([(run.stdout.strip().splitlines() or ["pytest failed"])[-1], *lines]))
    rows.append(("marked cuda" if device == "cuda" else "without a GPU", run.stdout.strip().splitlines()[-1], remark))
    return {}


if __name__ == "__main__":
    sys.exit(main())
