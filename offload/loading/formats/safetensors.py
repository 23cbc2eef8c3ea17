"""Reads folders as transformers saves them: config.json with weights in safetensors, or in pickles.

No code from a checkpoint is run. A damaged file is found by its header, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architecture.checkpoint_json import read_json
from ...architecture.config_checks import check_of_config
from ...architecture.families.family import decoder_test, is_text, is_wrapper, text_name
from ...architecture.hf_config import shape_from_config
from ...errors import CheckpointError, ModelNotFound, UnsupportedModel
from ...short_repr import short_text
from ..tokenizers.tokenizer_files import load_tokenizer
from .checkpoint import Checkpoint, Part, Weight, Weights
from .hf_quantization.choose import Layout, layout_of, quantization_text, quantized_weights
from .stacked_experts import expert_weights

if TYPE_CHECKING:
    from torch import Tensor

    from ..tokenizers.tokenizer import Tokenizer

_COMPARED = 1024  # rows at once
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class WeightFile:
    """A file of weights, opened when its first tensor is read. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: Any = None  # the open file, or a dictionary of pickled tensors

    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype, by safetensors' name, and the size of each tensor."""
        if self._path.suffix == ".bin":
            from .pickled import dtype_name

            return {name: (dtype_name(each), tuple(each.shape)) for name, each in self._opened().items()}
        with self._errors(), self._open("np") as file:  # "pt" would import torch
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}

    def read(self, name: str, part: Part | None) -> Tensor:
        file = self._opened()
        if isinstance(file, dict):
            return file[name][part or ...]
        return file.get_tensor(name) if part is None else file.get_slice(name)[part]

    def _opened(self) -> Any:
        if self._tensors is None:
            if self._path.suffix == ".bin":
                from .pickled import read_pickled  # it imports torch

                self._tensors = read_pickled(self._path)
            else:
                with self._errors():
                    self._tensors = self._open("pt").__enter__()
        return self._tensors

    def _open(self, framework: str) -> Any:
        from safetensors import safe_open

        return safe_open(self._path, framework=framework)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (SafetensorError, OSError) as error:
            message = f"{self._path} cannot be read, or is truncated: {short_text(str(error))}"
            raise CheckpointError(message, "fetch the model again") from error

    def close(self) -> None:
        self._tensors = None


@dataclass(frozen=True)
class StoredWeight:
    """A tensor as a file has it, whatever its dtype. It is a `Weight`."""

    size: tuple[int, ...]
    dtype: str
    file: WeightFile
    key: str
    bits = None
    is_quantized = False

    def read(self, part: Part | None = None) -> Tensor:
        return self.file.read(self.key, part)

    def quantized(self) -> None:
        return None


class FolderCheckpoint(Checkpoint):
    """A folder as transformers saves it: config.json, weights in one file or in shards, tokenizer files."""

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        if not config:
            raise ModelNotFound(f"{path} has no config.json", "--model takes a folder with config.json and safetensors")
        self.generation = read_json(path / "generation_config.json")
        self.shape = shape_from_config(config, self.generation, check=check_of_config(path / "config.json"))
        rename, reads = (text_name, is_text) if is_wrapper(config) else (str, decoder_test(config))
        self._open(path, rename, reads, layout_of(config))
        self.quantization = quantization_text(config) if self._layout else ""
        if self.shape.tied_embeddings:
            self.shape = replace(self.shape, tied_embeddings=self._shares_head())

    def _open(
        self, path: Path, rename: Callable[[str], str], reads: Callable[[str], bool], layout: Layout | None = None
    ) -> None:
        """Take a folder's files: `rename` returns the decoder's name of a tensor, `reads` whether that one is read."""
        self.path, self._rename, self._reads, self._layout = path, rename, reads, layout
        self._files = {name: WeightFile(path / name) for name in weight_files(path)}

    def _shares_head(self) -> bool:
        """Return whether the embedding is the output head: unless the files have both, and they differ."""
        embedding, head = (self._stored.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        if embedding is None or head is None:
            return True
        if (embedding.size, embedding.dtype) != (head.size, head.dtype):
            return False
        import torch

        with self.opened():
            parts = [(slice(start, start + _COMPARED),) for start in range(0, head.size[0], _COMPARED)]
            return all(torch.equal(head.read(part), embedding.read(part)) for part in parts)

    def files(self) -> list[Path]:
        return [self.path / name for name in self._files]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    @cached_property
    def _stored(self) -> dict[str, StoredWeight]:
        """All tensors of the files by the decoder's names."""
        return {
            self._rename(key): StoredWeight(size, dtype, file, key)
            for file in self._files.values()
            for key, (dtype, size) in file.headers().items()
        }

    @property
    def skipped(self) -> int:
        return sum(not self._reads(name) for name in self._stored)

    @cached_property
    def stored_weights(self) -> Weights:
        stored = {name: weight for name, weight in self._stored.items() if self._reads(name)}
        weights: dict[str, Weight] = expert_weights(self.shape.family_spec, stored)
        if self._layout is not None:
            weights = quantized_weights(self._layout, weights)
        for name, weight in weights.items():
            if isinstance(weight, StoredWeight) and name.endswith((".weight", ".bias")) and weight.dtype not in FLOATS:
                raise UnsupportedModel(
                    f"{self.path}: {name} is stored as {weight.dtype}, not as {', '.join(FLOATS)}",
                    "use the unquantised model, or a GGUF file of it",
                )
        return weights


def weight_files(path: Path) -> list[str]:
    """Return the names of a folder's weight files, in order. Raises CheckpointError, ModelNotFound."""
    whole, index = "model.safetensors", read_json(path / "model.safetensors.index.json")
    if not index and not (path / whole).exists():
        whole, index = "pytorch_model.bin", read_json(path / "pytorch_model.bin.index.json")
    if not index and not (path / whole).exists():
        raise ModelNotFound(f"{path} has no model.safetensors", "give a folder with it, or a .gguf file")
    shards = index.get("weight_map", {}) if index else {"": whole}
    files = sorted(map(str, set(shards.values()))) if isinstance(shards, Mapping) else []
    missing = [name for name in files if Path(name).name != name or not (path / name).is_file()]
    if missing or not files:
        names = short_text(", ".join(missing[:3]))
        raise CheckpointError(f"{path} lacks {len(missing)} of {len(files)} shards: {names}", "fetch the model again")
    return files
