"""Whether a model can be quantised while it is loaded."""

from __future__ import annotations

import torch

from ..errors import SettingsError
from ..kernels.native import KernelUnavailable, find_kernel
from ..kernels.native.ops import why_not
from ..settings.config import EngineConfig, Speculation
from .formats.quantized_checkpoint import QuantizedCheckpoint
from .formats.safetensors import Checkpoint


def check_quantize(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise SettingsError if `config.quantize` does not work here, whatever the model."""
    if config.quantize is not None and (reason := _why_not_here(config, device, dtype)):
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
    return QuantizedCheckpoint(checkpoint, config.quantize)


def check_self_draft(
    settings: Speculation, config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise SettingsError if there can be no quantised copy of a model that drafts for itself.

    A model that is quantised already needs none: it drafts with its own weights.
    """
    option = f"--draft {settings.draft}"
    if checkpoint.is_quantized:
        if settings.self_level is not None:
            raise _refusal(option, "the weights are quantised already", "use --draft self: they are the drafter's too")
    elif device.type != "cpu":
        raise _refusal(option, f"the model runs on {device.type}", "use --device cpu")
    elif reason := _why_not_here(config, device, dtype):
        raise _refusal(option, *reason)
    elif reason := why_not(checkpoint.shape, dtype, device):
        raise _refusal(option, f"the native kernel cannot run this model: {reason}", "use --draft lookup")


def _why_not_here(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return why no weights can be quantised here, and a hint; None if they can."""
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}", "use --dtype bfloat16"
    if config.kernel == "off":
        return "the kernel is off", "use --kernel auto"
    if device.type == "cuda":
        return None
    try:
        find_kernel(config.kernel)
    except KernelUnavailable as error:
        return f"there is no native kernel: {error}", "see triforce doctor"
    return None


def _refusal(option: str, reason: str, hint: str) -> SettingsError:
    return SettingsError(
        f"{option} needs a model in floating point, bfloat16, and on a CPU the native kernel: {reason}",
        f"{hint}, or leave {option.split()[0]} out",
    )
