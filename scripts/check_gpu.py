#!/usr/bin/env python3
"""Check triforce on a CUDA GPU: versions, kernels against fp64, the tests marked cuda, and a book by every method.

    scripts/check_gpu.sh                      everything, some minutes; the table is printed last
    scripts/check_gpu.sh --device cpu         a rehearsal without a GPU
    scripts/check_gpu.sh --json results.json  also write what was found

Installs and downloads nothing. Exit code 1: there is no GPU, or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "examples" / "frankenstein.txt"
MOST = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative error of a kernel's results
HEADS = ((32, 32, 128), (32, 8, 128), (9, 3, 64), (8, 1, 256))  # heads, KV heads, numbers of a head
METHODS = ("ar", "lookup", "retrieval", "streaming", "auto")
PATIENCE_S = 600  # of a command

Line = tuple[str, str]  # what, and what was found


def versions(device: torch.device) -> Iterator[Line]:
    """Yield what runs here. Raises RuntimeError without the native kernel."""
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}"
    for name in ("triton", "transformers", "numpy"):
        yield name, import_module(name).__version__ if find_spec(name) else "not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield (
            "GPU",
            f"{properties.name}, {properties.major}.{properties.minor}, {properties.total_memory / 2**30:.1f} GiB",
        )
        command = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max", "--format=csv,noheader"]
        yield "driver, PCIe", _run(command).stdout.strip()
    from offload.kernels.native import find_kernel

    yield "native kernel", find_kernel().level


def kernels(device: torch.device) -> Iterator[Line]:
    """Yield the errors of attention, norms, gates and linears relative to fp64. Raises ArithmeticError beyond MOST."""
    types = (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in types:
        for heads in HEADS:
            worst = max(_attention_errors(device, dtype, *heads))
            yield _judged(f"attention, {heads} heads, {_name(dtype)}", worst, dtype)
        yield _judged(f"rows, {_name(dtype)}", max(_row_errors(device, dtype)), dtype)


def _attention_errors(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> Iterator[float]:
    """Yield errors for one query token, drafts and a chunk, over short and long keys, causally and before them all."""
    from offload.kernels.attention import attend, attend_causal

    generator = torch.Generator().manual_seed(0)
    for tokens, keys in ((1, 17), (1, 4099), (8, 1000), (33, 2048), (300, 301)):
        q = torch.randn(tokens, heads, dim, generator=generator)
        k, v = torch.randn(2, kv_heads, keys, dim, generator=generator)
        rounded = [x.to(device, dtype) for x in (q, k, v)]
        for run, causal in ((attend, False), (attend_causal, True)):
            out, lse = run(*rounded)
            expected = _reference(*(x.double() for x in rounded), causal=causal)
            yield _error(out, expected[0])
            yield float((lse.double() - expected[1]).abs().max()) / 10  # absolute: a sum of exponentials


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp in fp64; of shapes as `attend` has them."""
    tokens, keys = len(q), k.shape[1]
    scores = torch.einsum("thgd,hkd->thgk", q.unflatten(1, (len(k), -1)), k) * q.shape[2] ** -0.5
    if causal:
        sees = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
        scores = scores.masked_fill(~sees[:, None, None], float("-inf"))
    out = torch.einsum("thgk,hkd->thgd", scores.softmax(-1), v)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1)


def _row_errors(device: torch.device, dtype: torch.dtype) -> Iterator[float]:
    """Yield errors of norms, gates and linears of the operations that a model has here."""
    from offload.kernels.ops import CudaOperations, TorchOperations

    operations = CudaOperations() if device.type == "cuda" else TorchOperations()
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7, 64):
        x, gate = (torch.randn(rows, width, generator=generator).to(device, dtype) for width in (576, 3072))
        weight = torch.randn(576, generator=generator).to(device, dtype)
        matrix = torch.randn(1536, 576, generator=generator).to(device, dtype) / 24
        yield _error(operations.norm(x, weight, 1e-5), F.rms_norm(x.double(), (576,), weight.double(), 1e-5))
        first, second = gate.double().chunk(2, -1)
        yield _error(operations.gated(gate), F.silu(first) * second)
        yield _error(operations.linear(matrix.clone())(x), x.double() @ matrix.double().T)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _judged(what: str, error: float, dtype: torch.dtype) -> Line:
    if not error <= MOST[dtype]:
        raise ArithmeticError(f"{what}: an error of {error:.1e}, where {MOST[dtype]:g} is allowed")
    return what, f"error {error:.1e} of fp64"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tests(device: torch.device) -> Iterator[Line]:
    """Yield the last line of the tests marked cuda, under torch's sanitizer; on a CPU of those of the link."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", "tests"]
    if device.type == "cpu":
        command = [*command[:-3], "--noconftest", "tests/memory/test_cuda_link.py"]
    done = _run(command, {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {})
    lines = done.stdout.strip().splitlines() or ["pytest said nothing"]
    if done.returncode:
        raise RuntimeError("; ".join([lines[-1], *(line for line in lines if line.startswith(("FAILED", "ERROR")))]))
    yield "marked cuda" if device.type == "cuda" else "of the link", lines[-1].strip("= ")


def book(device: torch.device) -> Iterator[Line]:
    """Yield the rates of each method on a book with the embedded model, whose texts are compared with plain decoding.

    On a GPU keys and values are streamed once, too. Raises RuntimeError if a text differs by more than ties.
    """
    ways: dict[str, list[str]] = {method: ["--method", method] for method in METHODS}
    if device.type == "cuda":
        ways["retrieval, streamed"] = ["--method", "retrieval", "--offload", "stream", "--resident-layers", "0"]
    characters, new = (20_000, "64") if device.type == "cuda" else (1_500, "12")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "book.txt"
        text.write_text(BOOK.read_text("utf-8")[:characters], "utf-8")
        common = [sys.executable, "-m", "triforce_cli", "generate", "-f", str(text), "Who writes?", "--json", "-n", new]
        common += ["--temperature", "0", "--verify", "--no-cache", "--device", device.type]
        for name, options in ways.items():
            done = _run([*common, *options])
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr.strip()[-300:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            each = f"{found['tokens_per_verification'] or 1:.2f} a verification"
            yield name, f"{found['tokens_per_s'] or 0:.1f} tokens/s, {each}, first after {found['ttft_s']:.2f} s"


PARTS: dict[str, Callable[[torch.device], Iterator[Line]]] = {
    "versions": versions,
    "kernels": kernels,
    "tests": tests,
    "book": book,
}


def _run(command: list[str], more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (more or {})
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def attempt(run: Callable[[torch.device], Iterator[Line]], device: torch.device) -> dict:
    """Return the lines of a part, its seconds, and why it failed, if it did: the other parts run all the same."""
    started, lines, failure = time.perf_counter(), [], None
    try:
        for line in run(device):
            lines.append(line)
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    return {"seconds": round(time.perf_counter() - started, 1), "failure": failure, "lines": lines}


def main() -> int:
    """Run the parts that are asked for and print the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"all, or some of: {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA GPU is available to torch\nhint: --device cpu rehearses without one", file=sys.stderr)
        return 1
    results = {}
    for name in args.parts or PARTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = attempt(PARTS[name], torch.device(args.device))
    for name, found in results.items():
        print(f"{name}: {found['failure'] or 'done'}, {found['seconds']} s")
        for what, value in found["lines"]:
            print(f"  {what:45} {value}")
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "parts": results}, indent=1) + "\n", "utf-8")
    return int(any(found["failure"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
