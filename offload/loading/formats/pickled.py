"""Reads pickled weights (pytorch_model.bin) with torch's restricted unpickler, which builds tensors and calls nothing.

Files are mapped, not copied.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...short_repr import first_line, short_text

SAFE_UNPICKLER = (2, 10)  # the first torch whose restricted unpickler has no known hole (CVE-2026-24747)
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_HINT = "fetch the model again, or use a safetensors version of it"


class _Slice(NamedTuple):
    """A tensor with the methods of safetensors' slices."""

    tensor: torch.Tensor

    def get_dtype(self) -> str:
        return _DTYPES.get(self.tensor.dtype, str(self.tensor.dtype))

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.tensor[part]


class PickledFile:
    """One file of weights, with the methods of safetensors' files. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_UNPICKLER:
            raise CheckpointError(f"torch {torch.__version__} is too old to read pickles safely", "upgrade torch")
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # corrupt archives and pickles raise many types
            raise CheckpointError(f"{path} cannot be read: {short_text(first_line(error))}", _HINT) from error
        values = self._tensors.values() if isinstance(self._tensors, dict) else [None]
        if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in values):
            raise CheckpointError(f"{path} is not a dictionary of tensors by name", _HINT)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])
