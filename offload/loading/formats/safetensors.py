"""The protocol of checkpoints, and the reader of folders with config.json and safetensors.

No code from a checkpoint is run. A damaged file is found by its header, before any weight is read.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ...architecture.checkpoint_json import read_json
from ...architecture.config import ModelShape
from ...architecture.config_checks import check_of_config
from ...architecture.families.family import is_decoder, is_text, is_wrapper, text_name
from ...architecture.hf_config import shape_from_config
from ...errors import CheckpointError, ModelNotFound, UnsupportedModel
from ...short_repr import short_text
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.tokenizer_files import load_tokenizer
from .gguf_tensors import GGUFTensors
from .hf_quantization.choose import StoredMatrices, layout_of, quantization_text
from .hf_quantization.stored import Header
from .stacked_experts import ExpertReader, View, expert_headers, expert_views, packed_bits

_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class TensorReader(Protocol):
    """Reads the weights of an open checkpoint, on the CPU."""

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Any:
        """Return a tensor, dequantised in fp32 or in the stored dtype.

        With `part`, slices of rows and columns, only that part is read where the format allows it.
        """

    def quantized(self, name: str) -> Any:
        """Return a `QuantizedTensor`, or None if the tensor is stored in floating point or in an unknown format."""


class Checkpoint(Protocol):
    """A model's shape, and its tensors under transformers' names."""

    path: Path
    shape: ModelShape
    generation: dict  # generation_config.json, or {}

    @property
    def is_quantized(self) -> bool:
        """Return whether any weights are quantised in the files."""

    @property
    def skipped(self) -> int:
        """Return how many tensors are of parts that do not run, such as those that read images."""

    @property
    def quantization(self) -> str:
        """Return what decides, besides the files of weights, which values quantised weights have; "" for nothing."""

    def files(self) -> list[Path]:
        """Return the files that contain the weights."""

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's name and size, from the headers. Raises CheckpointError, UnsupportedModel."""

    def tensors(self) -> Any:
        """Return a context manager that yields a `TensorReader`."""

    def quantized_bits(self) -> dict[str, float]:
        """Return the bits of a weight of every tensor that `TensorReader.quantized` gives, scales included."""

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises CheckpointError."""


QUANTIZED_FILE = "model.gguf"


class FolderCheckpoint:
    """A folder as transformers saves it: config.json, safetensors in one file or in shards, tokenizer files.

    The embedded model has the weights of its GGUF file in their place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / "config.json")
        if not config:
            raise ModelNotFound(f"{path} has no config.json", "--model takes a folder with config.json and safetensors")
        self.generation = read_json(path / "generation_config.json")
        self.shape = shape_from_config(config, self.generation, check=check_of_config(path / "config.json"))
        self._name: Callable[[str], str] = text_name if is_wrapper(config) else str
        self._reads: Callable[[str], bool] = is_text if is_wrapper(config) else is_decoder
        has_quantized = (path / QUANTIZED_FILE).is_file() and not any(path.glob("*.safetensors"))
        self._quantized = path / QUANTIZED_FILE if has_quantized else None
        self._layout = None if self._quantized else layout_of(config)
        self.quantization = quantization_text(config) if self._layout else ""
        self._files = [QUANTIZED_FILE] if self._quantized else weight_files(path)

    @property
    def is_quantized(self) -> bool:
        return self._gguf.is_quantized if self._quantized else bool(self._stored or packed_bits(self._views))

    def files(self) -> list[Path]:
        return [self.path / name for name in self._files]

    @cached_property
    def _gguf(self) -> GGUFTensors:
        return GGUFTensors(self._quantized, self.shape.heads, self.shape.kv_heads, names=self.shape.family_spec.gguf)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        if self._quantized:
            return self._gguf.sizes()
        headers = expert_headers(self._views, self._headers)
        plain = self._stored.plain(headers) if self._stored else headers
        for key, header in plain.items():
            if key.endswith((".weight", ".bias")) and header.dtype not in _FLOATS:
                raise UnsupportedModel(
                    f"{self.path}: {key} is stored as {header.dtype}, not as {', '.join(_FLOATS)}",
                    "use the unquantised model, or a GGUF file of it",
                )
        sizes = {key: header.size for key, header in plain.items()}
        return sizes | self._stored.sizes() if self._stored else sizes

    @cached_property
    def skipped(self) -> int:
        if self._quantized:
            return 0
        with self._opened_files("np") as files:
            return sum(not self._reads(self._name(key)) for file in files for key in file.keys())  # noqa: SIM118

    @cached_property
    def _headers(self) -> dict[str, Header]:
        with self._opened_files("np") as files:  # headers only: "pt" would import torch
            slices = {self._name(key): file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
            slices = {name: part for name, part in slices.items() if self._reads(name)}
            return {key: Header(part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}

    @cached_property
    def _views(self) -> dict[str, View]:
        return expert_views(self.shape.family_spec, self._headers)

    @cached_property
    def _stored(self) -> StoredMatrices | None:
        """The quantised weights in safetensors. Raises CheckpointError, UnsupportedModel."""
        if self._layout is None:
            return None
        with self._opened_files("np") as files:
            return StoredMatrices(self._layout, self._headers, _FileReader(files, self._name))

    @contextmanager
    def _opened_files(self, framework: str) -> Iterator[list[Any]]:
        with ExitStack() as stack:
            yield [stack.enter_context(_opened(path, framework)) for path in self.files()]

    def quantized_bits(self) -> dict[str, float]:
        if self._quantized:
            return self._gguf.quantized_bits()
        return packed_bits(self._views) | (self._stored.bits() if self._stored else {})

    @contextmanager
    def tensors(self) -> Iterator[TensorReader]:
        if self._quantized:
            with self._gguf.opened() as read:
                yield read
            return
        with self._opened_files("pt") as files:
            read = _FileReader(files, self._name)
            plain = ExpertReader(read, self._views) if self._views else read
            yield self._stored.reader(plain) if self._stored else plain

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)


class _FileReader:
    """A `TensorReader` of open safetensors files; `rename` returns the decoder's name of a tensor."""

    def __init__(self, files: list[Any], rename: Callable[[str], str] = str) -> None:
        self._stored = {rename(key): (file, key) for file in files for key in file.keys()}  # noqa: SIM118

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Any:
        file, key = self._stored[name]
        return file.get_tensor(key) if part is None else file.get_slice(key)[part]

    def quantized(self, name: str) -> None:
        return None


def weight_files(path: Path) -> list[str]:
    """Return the names of a folder's weight files, in order. Raises CheckpointError, ModelNotFound."""
    whole, index = "model.safetensors", read_json(path / "model.safetensors.index.json")
    if not index and not (path / whole).exists():
        whole, index = "pytorch_model.bin", read_json(path / "pytorch_model.bin.index.json")
    if not index and not (path / whole).exists():
        raise ModelNotFound(f"{path} has no model.safetensors", "give a folder with it, or a .gguf file")
    shards = index.get("weight_map", {}) if index else {"": whole}
    files = sorted(map(str, set(shards.values()))) if isinstance(shards, dict) else []
    missing = [name for name in files if Path(name).name != name or not (path / name).is_file()]
    if missing or not files:
        names = short_text(", ".join(missing[:3]))
        raise CheckpointError(f"{path} lacks {len(missing)} of {len(files)} shards: {names}", "fetch the model again")
    return files


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    """Yield an open file of weights. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    if path.suffix == ".bin":
        from .pickled import PickledFile  # it imports torch

        yield PickledFile(path)
        return
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = short_text(str(error))
        raise CheckpointError(f"{path} cannot be read, or is truncated: {reason}", "fetch the model again") from error
