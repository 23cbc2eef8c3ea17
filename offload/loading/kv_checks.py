"""Whether quantised keys and values work with a model, on a device."""

from __future__ import annotations

import torch

from ..architecture.config import ModelShape
from ..kernels import triton
from ..settings.config import EXACT, Speculation
from ..settings.validation import require


def missing_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, level: str) -> str | None:
    """Return the kernel that would attend to quantised keys and values and is missing; None if it is there.

    `level` is the native kernel's, "off" if torch computes.
    """
    if device.type == "cpu":
        return "the native kernel, on a CPU" if level == "off" else None
    reason = triton.why_not(device, dtype, head_dim)
    return None if reason is None else f"Triton's kernels, on a GPU, and they cannot run: {reason}"


def check_kv(kv: str, settings: Speculation, shape: ModelShape, missing: str | None) -> None:
    """Raise SettingsError if the full cache's format `kv` does not work; `missing` as `missing_kernel` returns it."""
    if kv == EXACT:
        return
    what = "caps attention scores" if shape.caps_scores else "has attention sinks"
    refused = shape.caps_scores or shape.has_sinks
    require(not refused, f"--kv {kv} does not work with {shape.family}, which {what}", "leave --kv out")
    require(missing is None, f"--kv {kv} needs {missing}", "leave --kv out; triforce doctor says more")
    require(
        settings.approximate is None,
        f"--kv {kv} and --approximate {settings.approximate} cannot be used together",
        "leave one of the two out",
    )


def check_retrieval_kv(
    kv: str, settings: Speculation, shape: ModelShape, device: torch.device, missing: str | None
) -> None:
    """Raise SettingsError if the retrieval cache's format does not work beside the full cache's; see `check_kv`."""
    kind, hint = settings.retrieval_kv, "leave --retrieval-kv out"
    if kind == EXACT:
        return
    require(kv == EXACT, f"--retrieval-kv {kind} needs keys and values without --kv {kv}", "leave one of the two out")
    require(missing is None, f"--retrieval-kv {kind} needs {missing}", hint)
    require(
        device.type == "cpu" or not shape.caps_scores,
        f"--retrieval-kv {kind} does not work with {shape.family} on a GPU, which caps attention scores",
        hint,
    )


def check_offloaded_retrieval_kv(settings: Speculation, device: torch.device) -> None:
    """Raise SettingsError if a CPU's retrieval cache would copy keys and values from another tier unquantised."""
    kind = settings.retrieval_kv
    require(
        kind == EXACT or device.type != "cpu",
        f"--retrieval-kv {kind} is for keys and values in memory, and these are offloaded",
        "leave --retrieval-kv out, or offloading",
    )
