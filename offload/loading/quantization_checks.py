"""What quantised weights, and quantised keys and values, do not go together with."""

import torch

from ..architecture.config import ModelShape
from ..errors import SettingsError
from ..kernels import triton
from ..kernels.native import KernelUnavailable, find_kernel
from ..kernels.native.ops import why_not
from ..kernels.native.structs import SPAN
from ..settings.config import EngineConfig
from ..settings.kv_formats import KV_FORMATS, PACKED_KV, PLAIN_KV
from ..settings.validation import require
from .formats.checkpoint import Checkpoint


def check_quantize(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise SettingsError if `config.quantize` does not work here, whatever the model."""
    if config.quantize is not None and (reason := _why_not_here(config, dtype)):
        raise _refusal(f"--quantize {config.quantize}", *reason)


def quantized(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint as `config.quantize` asks for it, after `check_quantize`. Raises SettingsError."""
    if config.quantize is None:
        return checkpoint
    option = f"--quantize {config.quantize}"
    if checkpoint.is_quantized:
        raise _refusal(option, f"{config.model} is quantised already", "use a model in bfloat16")
    if device.type == "cpu" and (reason := why_not(checkpoint.shape, dtype, device)):
        raise _refusal(option, f"the native kernel cannot run this model: {reason}", "use another model")
    return checkpoint.rounded(config.quantize)


def _why_not_here(config: EngineConfig, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return why no weights can be quantised here, and a hint; None if they can."""
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}", "use --dtype bfloat16"
    if config.kernel == "off":
        return "the kernel is off", "use --kernel auto"
    try:
        find_kernel(config.kernel)
    except KernelUnavailable as error:
        return f"there is no native kernel: {error}", "see triforce doctor"
    return None


def _refusal(option: str, reason: str, hint: str) -> SettingsError:
    return SettingsError(
        f"{option} needs a model in floating point, bfloat16, and the native kernel: {reason}",
        f"{hint}, or leave {option.split()[0]} out",
    )


def missing_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, level: str) -> str | None:
    """Return the kernel that would attend to quantised keys and values and is missing; None if it is there.

    `level` is the native kernel's, "off" if torch computes.
    """
    if device.type == "cpu":
        return "the native kernel, on a CPU" if level == "off" else None
    reason = triton.why_not(device, dtype, head_dim)
    return None if reason is None else f"Triton's kernels, on a GPU, and they cannot run: {reason}"


def check_kv(kv: str, shape: ModelShape, missing: str | None) -> None:
    """Raise SettingsError if the full cache's format `kv` does not work; `missing` as `missing_kernel` returns it."""
    if KV_FORMATS[kv] is PLAIN_KV:
        return
    what = "caps attention scores" if shape.caps_scores else "has attention sinks"
    refused = shape.caps_scores or shape.has_sinks
    require(not refused, f"--kv {kv} does not work with {shape.family}, which {what}", "leave --kv out")
    require(missing is None, f"--kv {kv} needs {missing}", "leave --kv out; triforce doctor says more")


def check_packed_kv(kv: str, shape: ModelShape, device: torch.device, dtype: torch.dtype, level: str) -> None:
    """Raise SettingsError if keys and values cannot be packed; `level` is the native kernel's, as in `missing_kernel`.

    Without effect on other formats.
    """
    if KV_FORMATS[kv] is not PACKED_KV:
        return
    what, hint = f"--kv {kv} packs keys and values", "leave --kv out"
    name = str(dtype).removeprefix("torch.")
    in_bf16 = dtype == torch.bfloat16
    require(in_bf16, f"{what} in bfloat16, and the dtype is {name}", f"use --dtype bfloat16, or {hint}")
    has_kernel = level != "off" or device.type != "cpu"
    require(has_kernel, f"--kv {kv} needs the native kernel", f"{hint}; triforce doctor says more")
    dim = shape.full_attention.head_dim
    require(dim % SPAN == 0, f"{what} of heads of a multiple of {SPAN}, and {shape.family} has heads of {dim}", hint)
