"""The parts of check_gpu.py in five calls of at most 10 minutes each: a run of 45 minutes, for one chance at a GPU.

The first call alone says whether the kernels are right. Each writes its own files, and needs nothing of the others but
the last one, which runs again what the results in the same folder say has failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_kernel import build_kernel
from gpu_report import Result
from gpu_rows import Rows
from gpu_tests import run_tests

if TYPE_CHECKING:
    from gpu_long import LongContext
    from gpu_machine import Machine

Part = Callable[[Rows], Result]  # adds to the rows while it runs, and returns the rest
Parts = Iterator[tuple[str, int, Part]]  # name, time limit in seconds, function
CALLS = (1, 2, 3, 4, 5)
LIMIT = 600  # seconds of a call


def call_parts(call: int, device: str, folder: Path, log: Path) -> Parts:
    """Yield the parts of a call; together they take less than LIMIT seconds."""
    from gpu_machine import Machine

    machine = Machine(device)
    if call == 5:
        yield from again(device, folder, log)
        return
    yield "kernel", 45, build_kernel
    yield from {1: _right, 2: _fast, 3: _capped, 4: _uncapped}[call](machine, device, folder, log)


def _right(machine: Machine, device: str, folder: Path, log: Path) -> Parts:
    yield "facts", 15, of("gpu_facts", "facts", machine)
    yield "pinning", 90, of("gpu_facts", "pinning", machine)
    yield "link sizes", 40, of("gpu_facts", "link_sizes", machine)
    yield "kernels", 120, of("gpu_attention", "kernels", machine)
    yield "tests", 240, partial(run_tests, device, log, sanitize=False)


def _fast(machine: Machine, device: str, folder: Path, log: Path) -> Parts:
    yield "rates", 20, machine.rates
    yield "attention", 200, of("gpu_attention", "sweep", machine)
    yield "linears", 90, of("gpu_quantized", "every_format", machine)
    yield "quantised KV", 60, of("gpu_quantized_kv", "quantised_kv", machine)
    yield "sanitizer", 150, partial(run_tests, device, log, tiers_alone=True)


def _capped(machine: Machine, device: str, folder: Path, log: Path) -> Parts:
    from gpu_long import LongContext

    yield from small_parts(machine)
    yield "experts", 19, of("gpu_experts", "experts", machine)
    yield "traces", 40, of("gpu_trace", "traces", machine, folder)
    yield from long_parts(machine, LongContext(machine))


def _uncapped(machine: Machine, device: str, folder: Path, log: Path) -> Parts:
    yield "resident", 230, of("gpu_text", "resident", machine)
    yield "distribution", 110, of("gpu_text", "distribution", machine)
    yield "families", 90, of("gpu_text", "families", machine)
    yield "batches", 20, of("gpu_text", "batches", machine)
    yield "restored", 15, of("gpu_text", "restored", machine)
    yield "two processes", 80, of("gpu_ranks", "two_processes", machine)


def again(device: str, folder: Path, log: Path) -> Parts:
    """Yield the parts that have failed, or were off, in the results of the other calls, as far as there is time."""
    left = LIMIT - 60
    for call in CALLS[:-1]:
        wanted = failed_parts(folder, call)
        needed = wanted | ({"kernel", "rates", "long context"} if wanted else set())
        for name, seconds, run in call_parts(call, device, folder, log) if wanted else ():
            if name in needed and seconds <= left:
                left -= seconds
                yield name, seconds, run


def failed_parts(folder: Path, call: int) -> set[str]:
    """Return the names of a call's parts that have failed or were off."""
    found: set[str] = set()
    for path in folder.glob(f"*-call{call}.json"):
        results = json.loads(path.read_text("utf-8"))
        is_gpu = results.pop("machine")["kind"] == "gpu"
        found |= {name for name, part in results.items() if part["state"] == "failed" or (is_gpu and part["off"])}
    return found


def kernel_and_tests(device: str, log: Path) -> Parts:
    """Yield what comes first: without the native kernel, other parts would measure what no user has."""
    yield "kernel", 45, build_kernel
    yield "tests", 65, partial(run_tests, device, log)


def small_parts(machine: Machine) -> Parts:
    """Yield the rates, without which nothing is predicted, and passes of few layers."""
    yield "rates", 20, machine.rates
    yield "link", 15, of("gpu_parts", "link_rates", machine)
    yield "overlap", 25, of("gpu_parts", "overlap", machine)
    yield "decoding", 40, of("gpu_parts", "decoding", machine)
    yield "resident steps", 25, of("gpu_steps", "resident_steps", machine)
    yield "pages", 25, of("gpu_pages", "pages", machine)


def long_parts(machine: Machine, long: LongContext) -> Parts:
    """Yield a long prompt, and the passes of all levels at 128K tokens, under a cap of 24 GiB."""
    yield "prefill", 50, of("gpu_prefill", "long_prefill", machine)
    with machine.capped():
        yield "long context", 80, long.build
        yield "verification", 70, long.verification
        yield "retrieval", 20, long.retrieval
        yield "triforce", 45, of("gpu_triforce", "triforce", machine, long)


def of(module: str, name: str, *arguments: object) -> Part:
    """Return a part that is a function of a module. If that cannot be imported, the part alone fails, with the reason.

    It is imported now: a part that is stopped while it imports would leave halves of modules to the next ones.
    """
    try:
        function = getattr(import_module(module), name)
    except Exception as error:
        return partial(_raise, error)
    return lambda rows: function(*arguments, rows)


def _raise(error: Exception, rows: Rows) -> Result:
    raise error
