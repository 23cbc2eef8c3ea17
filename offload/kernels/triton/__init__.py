"""Attention, products with quantised weights and operations on rows on a CUDA GPU by Triton; see `why_not`."""

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor

from ...errors import Degraded
from ...short_repr import first_line

__all__ = ["BLOCKS", "PLAIN", "ROWS", "serves", "serves_quantized", "serves_rows", "why_not"]
ROWS = 64  # tokens of a pass at most: a prompt's chunks are bound by arithmetic, which torch's kernels do better
PLAIN, BLOCKS = 0, 1  # layouts of keys and values, see attend.py
_LEAST_CAPABILITY = (8, 0)  # bf16 in the matrix units; older GPUs keep torch's operations


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why Triton's kernels cannot run there, or None.

    On the CPU they run in Triton's interpreter, for tests: TRITON_INTERPRET=1 in the environment.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; torch for CUDA brings it on Linux"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no kernel for {dtype}"
    if head_dim % 16 or head_dim > 256:
        return f"heads of {head_dim} numbers: multiples of 16 up to 256 are supported"
    if device.type == "cpu":
        return None if _is_interpreted() else "there is no GPU"
    if device.type != "cuda" or torch.version.hip:
        return f"no kernel for {device.type}"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    return None


def serves(q: Tensor) -> bool:
    """Return whether Triton attends with these queries `[tokens, heads, head_dim]`: a few rows on a GPU."""
    return q.device.type == "cuda" and len(q) <= ROWS and _runs("attend", q.device, q.dtype, q.shape[-1])


def serves_quantized(device: torch.device) -> bool:
    """Return whether Triton multiplies with quantised weights on a device, and dequantises them."""
    return device.type == "cuda" and _runs("multiply", device, torch.bfloat16)


def serves_rows(x: Tensor) -> bool:
    """Return whether Triton computes norms, RoPE and the gates of MLPs of rows like `x`: on a GPU."""
    return x.device.type == "cuda" and _runs("rows", x.device, x.dtype)


def _is_interpreted() -> bool:
    from triton import knobs

    return knobs.runtime.interpret


@cache
def _runs(what: str, device: torch.device, dtype: torch.dtype, head_dim: int = 16) -> bool:
    """Return whether kernels run, by launching them: they are compiled then, which needs a C compiler."""
    if why_not(device, dtype, head_dim) is not None:
        return False
    try:
        with torch.inference_mode():
            _TRIALS[what](device, dtype, head_dim)
    except Exception as error:  # of the compiler, the driver, or a GPU with too little shared memory
        reason = first_line(error)
        warnings.warn(f"Triton's kernels are not used, and steps will be slower: {reason}", Degraded, stacklevel=3)
        return False
    return True


def _try_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    from .accumulate import attend_stored

    rows = torch.zeros((ROWS, 1, head_dim), dtype=dtype, device=device)
    attend_stored(rows, rows.transpose(0, 1), rows.transpose(0, 1))


def _try_rows(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    from .row_ops import append, gated, rms_norm

    x, memory = (torch.zeros((1, size, head_dim), dtype=dtype, device=device) for size in (1, 16))
    rms_norm(x, x[0, 0], 1e-5)
    gated(x[0])
    append(x, x, x, (x, x), memory, memory.clone(), 0)


def _try_product(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    from ...architecture.weight_formats import FORMATS
    from ..device_weight import DeviceWeight
    from .row_ops import product

    codes = torch.zeros((16, 64, 16), dtype=torch.uint8, device=device)
    weight = DeviceWeight(FORMATS["Q4_0"], codes, torch.zeros((16, 64), dtype=torch.float16, device=device))
    rows = torch.zeros((ROWS, 512), dtype=dtype, device=device)
    product(rows, weight, None, rows[:, :64].contiguous(), False)


_TRIALS = {"attend": _try_attention, "rows": _try_rows, "multiply": _try_product}
