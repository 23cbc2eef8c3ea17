"""The tensors of a GGUF file: their names, sizes and types, and their values, quantised or not.

Imports neither torch nor gguf until tensors are read.
"""

from __future__ import annotations

import mmap
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...architecture.config import ModelShape
from ...architecture.families import FAMILIES, GGUFNames
from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_text
from .gguf_header import check_metadata
from .layer_tensors import checkpoint_sizes, layer_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.quantized import QuantizedTensor

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FLOATS = ("F64", "F32", "F16", "BF16")  # ggml's names
_NAMES = {theirs: ours for ours, theirs in _TENSORS.items()}
_LLAMA = FAMILIES["llama"].gguf
_BARE = ("self_attn.sinks",)  # whose names in safetensors do not end with .weight
_FREQUENCIES = ("attn_rot_embd", "rope_freqs")  # RoPE's, of old files
_LAYER = re.compile(r"blk\.(?P<layer>\d{1,9})\.(?P<stem>\w+)")
_STORED = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")


class Place(NamedTuple):
    """Where a tensor is: the name of the file's tensor, and the number of the expert that the part of it belongs to."""

    name: str
    expert: int | None = None

    def part(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of the tensor, from that of the file's."""
        return size if self.expert is None else size[1:]


def _part(data: Any, expert: int | None) -> Any:
    return data if expert is None else data[expert]


class GGUFTensors:
    """The tensors of one file under transformers' names, with the rows of q and k in transformers' order.

    It is a `TensorReader`. `heads` and `kv_heads` are the model's, and `names` its family's.
    """

    def __init__(
        self, path: Path, heads: int, kv_heads: int, reader: Any = None, names: GGUFNames | None = None
    ) -> None:
        self.path = path
        self._reader = reader or open_gguf(path)
        names = names or _LLAMA
        self._heads = {"attn_q": heads, "attn_k": kv_heads} if names.permutes else {}
        self._modules = _NAMES | dict(names.tensors)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @cached_property
    def _names(self) -> dict[str, Place]:
        places = {}
        for name in self._tensors:
            ours = self._transformers_name(name)
            if ours is not None and "*" in ours:
                places |= {ours.replace("*", str(i)): Place(name, i) for i in range(self._experts(name))}
            elif ours is not None:
                places[ours] = Place(name)
        return places

    def _experts(self, name: str) -> int:
        """Return of how many experts a tensor has the matrices. Raises CheckpointError."""
        size = self._tensors[name].shape
        if len(size) != (2 if name.endswith(".bias") else 3):
            raise CheckpointError(f"{self.path}: {name} has no part for each expert", "convert the model again")
        return int(size[-1])

    def _transformers_name(self, name: str) -> str | None:
        """Map blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; None for a tensor that is not a weight.

        The name of a tensor with the matrices of all experts has * in place of their numbers.
        """
        match = _STORED.fullmatch(name)
        if match is None or match["stem"] not in self._modules:
            return None
        layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
        module = self._modules[match["stem"]]
        return f"{layer}{module}" if module in _BARE else f"{layer}{module}.{match['kind']}"

    def unused(self, shape: ModelShape) -> Iterator[str]:
        """Yield the names of tensors of a model's layers that the decoder does not use."""
        layers = {spec: checkpoint_sizes(shape, layer_sizes(shape, spec)) for spec in dict.fromkeys(shape.specs)}
        for name in self._tensors:
            match = _LAYER.match(name)
            if match is None or match["stem"] in _FREQUENCIES or int(match["layer"]) >= shape.layers:
                continue
            ours = self._transformers_name(name)
            prefix = f"model.layers.{match['layer']}."
            ours = ours and ours.removeprefix(prefix).replace("*", "0")
            if ours is None or ours not in layers[shape.spec(int(match["layer"]))]:
                yield name

    @property
    def is_quantized(self) -> bool:
        """Return whether any tensor is quantised."""
        return any(tensor.tensor_type.name not in _FLOATS for tensor in self._tensors.values())

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's name and size. Raises CheckpointError if tensors do not lie as the format requires."""
        self._check_layout()
        sizes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in self._tensors.items()}
        return {ours: place.part(sizes[place.name]) for ours, place in self._names.items()}

    def _check_layout(self) -> None:
        """Check that the tensors follow each other, each aligned. Raises CheckpointError."""
        end, offset, alignment = self.path.stat().st_size, self._reader.data_offset, int(self._reader.alignment)
        for tensor in self._reader.tensors:
            if tensor.data_offset != offset:
                raise CheckpointError(f"{self.path} is corrupt: {tensor.name} is misplaced", "fetch the model again")
            if offset + tensor.n_bytes > end:
                raise CheckpointError(f"{self.path} is truncated inside {tensor.name}", "fetch the model again")
            offset += -(-tensor.n_bytes // alignment) * alignment

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor dequantised to fp32: as a whole, and then sliced."""
        stored, expert = self._names[name]
        weight, order = self.dequantized(stored, expert), self._row_order(stored)
        return (weight if order is None else weight[order])[part or ...]

    def dequantized(self, stored: str, expert: int | None = None) -> Tensor:
        """Return the tensor that the file calls `stored`, in fp32, in the file's layout, or one expert's part of it.

        Raises UnsupportedModel.
        """
        import torch
        from gguf import dequantize

        tensor = self._tensors[stored]
        try:
            return torch.from_numpy(dequantize(_part(tensor.data, expert), tensor.tensor_type).copy())
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UnsupportedModel(f"{self.path}: {stored} is quantised as {kind}", str(error)) from error

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return a tensor as it is stored, or None for types that the native kernel does not read."""
        import torch

        from .gguf_blocks import FORMATS, split_blocks

        stored, expert = self._names[name]
        kind, data = self._tensors[stored].tensor_type.name, _part(self._tensors[stored].data, expert)
        if kind not in FORMATS:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that cannot be written to: nothing writes here
            mapped = torch.from_numpy(data)
        order = self._row_order(stored)
        return split_blocks(kind, mapped if order is None else mapped[order])

    @contextmanager
    def opened(self) -> Iterator[GGUFTensors]:
        """Yield this reader, and give back the memory of what was read of the file, which counts as this process's."""
        try:
            yield self
        finally:
            if hasattr(mmap, "MADV_DONTNEED"):  # what is read again comes from the file
                with suppress(OSError):  # of locked memory
                    self._reader.data.base.madvise(mmap.MADV_DONTNEED)

    def quantized_bits(self) -> dict[str, float]:
        """Return the bits of a weight of every tensor that `quantized` gives, scales included."""
        from .gguf_blocks import FORMATS

        kinds = {ours: self._tensors[place.name].tensor_type.name for ours, place in self._names.items()}
        return {name: FORMATS[kind].bits_per_weight for name, kind in kinds.items() if kind in FORMATS}

    def _row_order(self, stored: str) -> Tensor | None:
        """Return the rows of q and k in transformers' order; llama.cpp's RoPE pairs neighbours, not halves."""
        import torch

        heads = self._heads.get(stored.split(".")[-2])
        if heads is None:
            return None
        rows = int(self._tensors[stored].shape[-1])
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def open_gguf(path: Path) -> Any:
    """Return gguf's reader of a file whose metadata has been checked. Raises CheckpointError."""
    from gguf import GGUFReader

    check_metadata(path)
    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises any exception for a damaged file
        raise CheckpointError(
            f"{path} is corrupt, or not a GGUF file that can be read: {short_text(str(error))}", "fetch the model again"
        ) from error
