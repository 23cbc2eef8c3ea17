"""Reads pickled weights (pytorch_model.bin) with torch's restricted unpickler, which builds tensors and calls nothing.

Files are mapped, not copied.
"""

from pathlib import Path

import torch

from ...errors import CheckpointError
from ...short_repr import first_line, short_text

SAFE_UNPICKLER = (2, 10)  # the first torch whose restricted unpickler has no known hole (CVE-2026-24747)
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_HINT = "fetch the model again, or use a safetensors version of it"


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name. Raises CheckpointError."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_UNPICKLER:
        raise CheckpointError(f"torch {torch.__version__} is too old to read pickles safely", "upgrade torch")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # corrupt archives and pickles raise many types
        raise CheckpointError(f"{path} cannot be read: {short_text(first_line(error))}", _HINT) from error
    values = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in values):
        raise CheckpointError(f"{path} is not a dictionary of tensors by name", _HINT)
    return tensors


def dtype_name(tensor: torch.Tensor) -> str:
    """Return safetensors' name of a tensor's dtype."""
    return _DTYPES.get(tensor.dtype, str(tensor.dtype))
