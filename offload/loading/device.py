"""The device and the dtype that a model runs with, from the names in its configuration."""

from __future__ import annotations

import torch

from ..errors import SettingsError


def resolve_device(name: str, index: int = 0) -> torch.device:
    """Return the device of a name; `auto` is the CUDA GPU of that index, else the CPU.

    Raises SettingsError for a device that is not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("no CUDA device is available to this torch", "use --device cpu, or install torch for CUDA")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and index >= torch.cuda.device_count():
        raise SettingsError(
            f"there is no GPU {index}: torch sees {torch.cuda.device_count()}", "start as many ranks as there are GPUs"
        )
    return torch.device(name, index) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is bf16, or fp16 on GPUs without bf16: decoding is bound by bytes read."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16
