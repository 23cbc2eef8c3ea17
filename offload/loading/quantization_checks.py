"""Whether a model can be quantised while it is loaded."""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..errors import SettingsError
from ..kernels.native import KernelUnavailable, find_kernel
from ..kernels.native.ops import why_not
from .quantized_checkpoint import QuantizedCheckpoint
from .safetensors import Checkpoint


def check_quantize(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise SettingsError if `config.quantize` does not work here, whatever the model."""
    if config.quantize is None:
        return
    if dtype != torch.bfloat16:
        raise _refusal(config, f"the dtype is {str(dtype).removeprefix('torch.')}", "use --dtype bfloat16")
    if config.kernel == "off":
        raise _refusal(config, "the kernel is off", "use --kernel auto")
    if device.type == "cuda":
        return
    try:
        find_kernel(config.kernel)
    except KernelUnavailable as error:
        raise _refusal(config, f"there is no native kernel: {error}", "see triforce doctor") from error


def quantized(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint as `config.quantize` asks for it, after `check_quantize`. Raises SettingsError."""
    if config.quantize is None:
        return checkpoint
    if checkpoint.is_quantized:
        raise _refusal(config, f"{config.model} is quantised already", "use a model in bfloat16")
    if device.type == "cpu" and (reason := why_not(checkpoint.shape, dtype, device)):
        raise _refusal(config, f"the native kernel cannot run this model: {reason}", "use another model")
    return QuantizedCheckpoint(checkpoint, config.quantize)


def _refusal(config: EngineConfig, reason: str, hint: str) -> SettingsError:
    return SettingsError(
        f"--quantize {config.quantize} needs a model in floating point, bfloat16, and on a CPU the native kernel: "
        f"{reason}",
        f"{hint}, or leave --quantize out",
    )
