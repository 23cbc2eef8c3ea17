"""Attention over pages by six models' heads: against fp64, and how fast by stages, splits and rows.

Knobs of the environment: GPU_STAGES=2,3 and GPU_SPLITS=16,32,64 are what `sweep` tries; GPU_PAGE_TOKENS the tokens of a
page whose attention is checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gpu_machine import Machine
from gpu_models import llama
from gpu_pages import has_kernel
from gpu_rows import Rows
from gpu_steps import ROWS
from torch import Tensor

from offload.kernels import triton
from offload.kernels.attention import attend as torch_attend
from offload.kernels.native import find_kernel
from offload.memory.page import BlockPageFormat, PageFormat, PlainPageFormat

# Query heads, KV heads and numbers of a head.
HEADS = {
    "Llama-2-7B": (32, 32, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "Gemma": (8, 4, 256),
    "gpt-oss": (64, 8, 64),
}
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative, against fp64


def knob(name: str, default: str) -> tuple[int, ...]:
    """Return the numbers of an environment variable."""
    return tuple(map(int, os.environ.get(name, default).split(",")))


def kernels(machine: Machine, rows: Rows) -> dict:
    """Compare attention with fp64, over plain pages and the native kernel's, in three types; a wrong one fails."""
    (tokens,) = knob("GPU_PAGE_TOKENS", "128" if machine.small else "1024")
    types = (torch.float32,) if machine.small else (torch.bfloat16, torch.float16, torch.float32)
    checked = 0
    for name, (heads, kv_heads, head_dim) in HEADS.items():
        shape = llama(1, heads * head_dim, heads, 128, 512, 8192, kv_heads)
        for dtype in types:
            formats: dict[str, PageFormat] = {"plain": PlainPageFormat(shape, tokens)}
            if has_kernel() and dtype == torch.bfloat16:
                formats["blocks"] = BlockPageFormat(shape, tokens, find_kernel())
            for kind, format in formats.items():
                worst = max(_error(machine, format, (heads, kv_heads, head_dim), dtype, count) for count in ROWS)
                by = "Triton" if triton.serves(torch.empty(1, heads, head_dim, device=machine.device)) else "torch"
                rows.agree(f"{name}, {kind}, {str(dtype).removeprefix('torch.')}, {by}", worst, MOST_ERROR[dtype])
                checked += 1
    return {"checked": checked}


def _error(machine: Machine, format: PageFormat, sizes: tuple[int, int, int], dtype: torch.dtype, count: int) -> float:
    """Return the error of attention to a whole page and causally to the start of another, as over two pages."""
    heads, kv_heads, head_dim = sizes
    random = torch.Generator(machine.device).manual_seed(count)
    draw = lambda *size: torch.randn(size, generator=random, device=machine.device).to(dtype)  # noqa: E731
    keys, values = (draw(kv_heads, 2 * format.tokens, head_dim) for _ in range(2))
    q, seen = draw(count, heads, head_dim), format.tokens // 2
    pages = torch.zeros(2, format.numbers, dtype=dtype, device=machine.device)
    for number, page in enumerate(pages):
        at = slice(number * format.tokens, (number + 1) * format.tokens)
        format.write(page, 0, keys[:, at], values[:, at])
    result = format.accumulator(q)
    result.attend(pages[0], slice(0, count), format.tokens)
    result.attend(pages[1], slice(0, count), seen, causal=True)
    found = result.output(None)
    return _relative(found, reference(q, keys, values, format.tokens + seen))


def reference(q: Tensor, keys: Tensor, values: Tensor, seen: int) -> Tensor:
    """Return causal attention in fp64, of rows the first of which sees `seen` keys: `[rows, heads, head_dim]`."""
    group = q.shape[1] // len(keys)
    k, v = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = torch.einsum("thd,hnd->htn", q.double(), k) * q.shape[2] ** -0.5
    sees = torch.arange(k.shape[1], device=q.device) < torch.arange(seen, seen + len(q), device=q.device).unsqueeze(1)
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return torch.einsum("htn,hnd->thd", weights, v)


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def sweep(machine: Machine, rows: Rows) -> dict:
    """Measure attention to 128K keys by stages, splits and rows; note the fastest of each, in bytes a second."""
    tokens, found = (512 if machine.small else 131072), {}
    for name, (heads, kv_heads, head_dim) in HEADS.items():
        keys, values = (
            torch.randn(kv_heads, tokens, head_dim, device=machine.device).to(machine.dtype) for _ in range(2)
        )
        nbytes = keys.nbytes + values.nbytes
        for count in ROWS:
            q = torch.randn(count, heads, head_dim, device=machine.device).to(machine.dtype)
            rates = {label: nbytes / machine.seconds(run, 5, 2) for label, run in _runs(q, keys, values)}
            best = max(rates, key=rates.__getitem__)
            every = ", ".join(f"{label}: {rate / 1e12:.2f}" for label, rate in rates.items())
            rows.add(f"{name}, {count} rows", f"{rates[best] / 1e12:.3f} TB/s", f"{best}; {every}")
            found[f"{name}, {count}"] = rates
        del keys, values
        machine.clear()
    return {"bytes_per_s": found}


def _runs(q: Tensor, keys: Tensor, values: Tensor) -> Iterator[tuple[str, object]]:
    """Yield what is measured: Triton's kernel by stages and splits; without it, torch's attention."""
    if not triton.serves(q):
        yield "torch", lambda: torch_attend(q, keys, values)
        return
    from offload.kernels.triton import ops

    for stages in knob("GPU_STAGES", "2,3"):
        for splits in knob("GPU_SPLITS", "16,32,64"):
            states = ops.new_state(q, splits)

            def run(states: Tensor = states, stages: int = stages) -> None:
                with staged(stages):
                    ops.attend_pages(q, keys, values, states, keys.shape[1], False, True, triton.PLAIN)
                ops.finish(states, q, None)

            yield f"{stages} stages, {splits} splits", run


class _Staged:
    """A Triton kernel that is always launched with so many stages."""

    def __init__(self, kernel: object, stages: int) -> None:
        self._kernel, self._stages = kernel, stages

    def __getitem__(self, grid: object) -> object:
        launch = self._kernel[grid]
        return lambda *args, **options: launch(*args, **options | {"num_stages": self._stages})


@contextmanager
def staged(stages: int) -> Iterator[None]:
    """Within it, attention's kernel has so many stages, whatever its tiles."""
    from offload.kernels.triton import attend

    kernel = attend.attend_kernel
    attend.attend_kernel = _Staged(kernel, stages)
    try:
        yield
    finally:
        attend.attend_kernel = kernel
