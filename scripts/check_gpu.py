"""Run the parts of check_gpu.sh, each with a time limit; write the results as JSON and as a Markdown table."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpu_bare import hide, is_missing
from gpu_calls import CALLS, Part, call_parts, kernel_and_tests, long_parts, of, small_parts
from gpu_report import Report, Result, hardware
from gpu_rows import Line, Rows, Skipped

ROOT = Path(__file__).parents[1]
PATIENCE = {"cuda": 1, "cpu": 10}  # what time limits are multiplied by: in miniature, other programs may be running
NEEDED = ("torch", "transformers", "safetensors", "psutil", "numpy")


def main() -> int:
    """Run the parts and print the table; return 1 if a part failed or a measurement is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--call", type=int, choices=CALLS, help="one of the five parts of a run of 45 minutes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bare", action="store_true", help="hide all packages that the check can do without")
    args = parser.parse_args()
    if args.bare:
        hide()
    if missing := [name for name in NEEDED if is_missing(name)]:
        return complain(f"this Python has no {', '.join(missing)}", "name one that has it: PYTHON=/path/to/python")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return complain(
            "no CUDA GPU is available to torch",
            "run this on a machine that has one, with torch for CUDA; --device cpu tries everything in miniature",
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    report = Report(args.folder, hardware(args.device), f"-call{args.call}" if args.call else "")
    log = report.file("-tests.log")
    planned = parts(args.device, log) if args.call is None else call_parts(args.call, args.device, args.folder, log)
    for name, seconds, run in planned:
        report.add(name, attempt(name, PATIENCE[args.device] * seconds, run, partial(report.tell, name)))
    print(report.table())
    return 1 if report.failed else 0


def complain(message: str, hint: str) -> int:
    """Print an error with a hint and return exit code 1."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return 1


def parts(device: str, log: Path) -> Iterator[tuple[str, int, Part]]:
    """Yield (name, time limit in seconds, function) of each part of the check; together less than 10 minutes.

    The output of the tests goes to the file `log`.
    """
    from gpu_long import LongContext
    from gpu_machine import Machine

    yield from kernel_and_tests(device, log)
    machine = Machine(device)
    yield from small_parts(machine)
    yield "quantised linears", 19, of("gpu_quantized", "quantized_linears", machine)
    yield "experts", 19, of("gpu_experts", "experts", machine)
    yield "quantised KV", 35, of("gpu_quantized_kv", "quantised_kv", machine)
    yield from long_parts(machine, LongContext(machine))


def attempt(name: str, seconds: int, run: Part, told: Callable[[Line], object] = lambda line: None) -> Result:
    """Return the result of a part, or the reason why it was skipped or failed; `told` is given its lines as they come.

    A part fails too if it takes too long, or if something in it runs slower than it could.
    """
    print(f"{name}: at most {seconds} s", file=sys.stderr, flush=True)
    start, rows, found = time.perf_counter(), Rows(told), {}
    try:
        with limit(seconds), warned(rows):
            found = run(rows)
        state = "failed" if rows.slower else "done"
    except Skipped as reason:
        state = "skipped"
        rows.append(("", state, str(reason)))
    except TimeoutError:
        state = "failed"
        rows.append(("", state, f"took longer than {seconds} s"))
    except Exception as error:  # the other parts run all the same
        traceback.print_exc()
        state = "failed"
        rows.append(("", state, f"{type(error).__name__}: {error}".splitlines()[0][:200]))
    seconds = round(time.perf_counter() - start, 1)
    return {"state": state, "seconds": seconds, "rows": rows, "comparisons": rows.comparisons, "off": rows.off, **found}


@contextmanager
def warned(rows: Rows) -> Iterator[None]:
    """Add a line for each distinct warning that something runs slower than it could, such as steps without graphs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            texts = [str(each.message) for each in caught if each.category.__name__ == "Degraded"]
            for text in dict.fromkeys(texts):
                rows.add("warning", "slower", text.splitlines()[0][:200])
                rows.slower += 1


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


if __name__ == "__main__":
    sys.exit(main())
