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
from ...architecture.weight_formats import FORMATS
from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_text
from .layer_tensors import checkpoint_sizes, layer_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.quantized import QuantizedTensor

_MODULES = {  # llama.cpp's names of tensors -> transformers'
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FLOATS = ("F64", "F32", "F16", "BF16")  # ggml's names
_BARE = ("self_attn.sinks",)  # whose names in safetensors do not end with .weight
_FREQUENCIES = ("attn_rot_embd", "rope_freqs")  # RoPE's, of old files
_LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)")
_STORED = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")


def open_gguf(path: Path) -> Any:
    """Return gguf's reader of a file. Raises CheckpointError."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises any exception for a damaged file
        reason = short_text(str(error))
        raise CheckpointError(f"{path} is corrupt, or not a GGUF file: {reason}", "fetch the model again") from error


class Place(NamedTuple):
    """Where a tensor is: the name of the file's tensor, and the number of the expert that the part of it belongs to."""

    name: str
    expert: int | None = None


class GGUFTensors:
    """The tensors of one file under transformers' names, with the rows of q and k in transformers' order.

    It is a `TensorReader`. `heads` and `kv_heads` are the model's, and `names` its family's.
    """

    def __init__(
        self, path: Path, heads: int, kv_heads: int, reader: Any = None, names: GGUFNames | None = None
    ) -> None:
        self.path = path
        self._reader = reader or open_gguf(path)
        names = names or FAMILIES["llama"].gguf
        self._heads = {"attn_q": heads, "attn_k": kv_heads} if names.permutes else {}
        self._modules = _MODULES | dict(names.tensors)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @cached_property
    def _names(self) -> dict[str, Place]:
        places = {}
        for name, tensor in self._tensors.items():
            ours = self._transformers_name(name)
            if ours is not None and "*" in ours:
                places |= {ours.replace("*", str(i)): Place(name, i) for i in range(int(tensor.shape[-1]))}
            elif ours is not None:
                places[ours] = Place(name)
        return places

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
            if match is None or match[2] in _FREQUENCIES or int(match[1]) >= shape.layers:
                continue
            ours = self._transformers_name(name)
            ours = ours and ours.removeprefix(f"model.layers.{match[1]}.").replace("*", "0")
            if ours not in layers[shape.spec(int(match[1]))]:
                yield name

    @property
    def is_quantized(self) -> bool:
        """Return whether any tensor is quantised."""
        return any(tensor.tensor_type.name not in _FLOATS for tensor in self._tensors.values())

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's name and size."""
        sizes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in self._tensors.items()}
        return {
            ours: sizes[name] if expert is None else sizes[name][1:] for ours, (name, expert) in self._names.items()
        }

    def _stored(self, name: str, expert: int | None) -> tuple[str, Any]:
        """Return the type of a tensor of the file, and its data or one expert's part of it."""
        tensor = self._tensors[name]
        return tensor.tensor_type.name, tensor.data if expert is None else tensor.data[expert]

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor dequantised to fp32: as a whole, and then sliced."""
        place = self._names[name]
        weight, order = self.dequantized(*place), self._row_order(place.name)
        return (weight if order is None else weight[order])[part or ...]

    def dequantized(self, stored: str, expert: int | None = None) -> Tensor:
        """Return the tensor that the file calls `stored`, in fp32, in the file's layout, or one expert's part of it.

        Raises UnsupportedModel.
        """
        import torch
        from gguf import dequantize

        kind, data = self._stored(stored, expert)
        try:
            return torch.from_numpy(dequantize(data, self._tensors[stored].tensor_type).copy())
        except NotImplementedError as error:
            raise UnsupportedModel(f"{self.path}: {stored} is quantised as {kind}", str(error)) from error

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Return a tensor as it is stored, or None for types that the native kernel does not read."""
        import torch

        from .gguf_blocks import split_blocks

        place = self._names[name]
        kind, data = self._stored(*place)
        if kind not in FORMATS:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that cannot be written to: nothing writes here
            mapped = torch.from_numpy(data)
        order = self._row_order(place.name)
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
