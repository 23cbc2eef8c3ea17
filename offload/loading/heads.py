"""Opens, checks and loads trained heads: EAGLE-3 in folders of their own, and the MTP head in a target's checkpoint."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architecture.checkpoint_json import read_json
from ..architecture.config import ModelShape
from ..architecture.config_checks import ConfigCheck, check_of_config
from ..architecture.head_shape import HeadDimensions, HeadShape, eagle3_shape, is_head, mtp_shape
from ..architecture.weight_formats import format_of
from ..errors import CheckpointError
from ..kernels.ops import Operations
from ..model.decoder import Model
from ..model.heads import MTP, Eagle3, Head
from ..model.layer import Layer
from ..parallel import ALONE
from .formats.layer_tensors import Sizes, checkpoint_sizes, layer_sizes
from .formats.quantization import QuantizingReader
from .formats.safetensors import FolderCheckpoint, TensorReader, weight_files
from .formats.tensor_checks import check_sizes
from .weight_reader import WeightReader
from .weights import load_layer

_LAYER = re.compile(r"midlayer\.|layers\.(\d+)\.")
_EAGLE_NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.0.hidden_norm.weight", "model.norm.weight")
_MTP_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "model.norm.weight")


class HeadCheckpoint(FolderCheckpoint):
    """A drafter of one target, with the decoder's names of tensors. Each kind is a subclass.

    `shape_of` reads its config for a target, and `_name` returns the decoder's name of a tensor, "" for one that is not
    read.
    """

    shape_of: Callable[[Mapping[str, Any], Any, ConfigCheck], HeadShape]

    def __init__(self, path: Path, target: ModelShape) -> None:
        """Read the config of a drafter for a target.

        Raises SettingsError if it is for another one, UnsupportedModel, CheckpointError, ModelNotFound.
        """
        config = read_json(path / "config.json") if path.is_dir() else {}
        self.head = self.shape_of(config, target, check_of_config(path / "config.json"))
        self.path, self.generation, self.shape, self._reads = path, {}, self.head.layers, bool
        self._quantized = self._layout = None
        self.quantization = ""
        self._files = weight_files(path)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether its folder has a tokenizer of its own, which should be the target's."""
        return False

    @property
    def dimensions(self) -> HeadDimensions:
        """Return its dimensions, with the parameters that are there."""
        return self.head.dimensions

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and sizes of the tensors that must be there: here those of its layers."""
        for index in range(self.shape.layers):
            for name, size in self._layer_sizes(index).items():
                yield f"model.layers.{index}.{name}", size

    def _layer_sizes(self, index: int) -> Sizes:
        return checkpoint_sizes(self.shape, layer_sizes(self.shape, self.shape.spec(index)))

    def check(self) -> None:
        """Check by the headers that every tensor is there with its size. Raises CheckpointError."""
        check_sizes(f"{self.path}: the drafter", self.expected(), self.sizes())

    def load(self, target: Model, operations: Operations, level: str | None = None) -> Head:
        """Load the drafter of a loaded target; it has been checked.

        Its matrices are rounded to a `level` (q4, q5, q6, q8), if one is given: no output depends on it.
        """
        with self.opened(target, operations, level) as (read, reader):
            layers = [load_layer(reader, self.shape, index) for index in range(self.shape.layers)]
            return self._head(read, reader, layers, self.head, target, operations)

    @contextmanager
    def opened(
        self, target: Model, operations: Operations, level: str | None
    ) -> Iterator[tuple[TensorReader, WeightReader]]:
        """Yield what reads its tensors, and its weights for a target, rounded as in `load`."""
        with self.tensors() as read:
            sizes = self.sizes().items() if level is not None else ()
            formats = {name: format_of(str(level), name, size) for name, size in sizes if name.endswith(".weight")}
            rounding = QuantizingReader(read, {name: kind for name, kind in formats.items() if kind is not None})
            yield read, WeightReader(rounding, target.dtype, target.device, operations, ALONE, None, self.shape)

    def _head(self, read: TensorReader, reader: WeightReader, layers: list[Layer], *of: Any) -> Head:
        """Return the head of its `layers`; `of` are the first arguments of `Head`."""
        raise NotImplementedError


class Eagle3Checkpoint(HeadCheckpoint):
    """An EAGLE-3 head in a folder of its own."""

    shape_of = staticmethod(eagle3_shape)

    @staticmethod
    def _name(name: str) -> str:
        name = name.removeprefix("model.")
        if match := _LAYER.match(name):
            return f"model.layers.{match[1] or 0}.{name[match.end() :]}"
        return f"model.{name}" if name in ("norm.weight", "embed_tokens.weight") else name

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").is_file()

    @cached_property
    def dimensions(self) -> HeadDimensions:
        found, dims = self.sizes(), self.head.dimensions
        more = prod(found.get("model.embed_tokens.weight", (0,)))
        return replace(dims, more=dims.more + more, shares_head="lm_head.weight" not in found)

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        head, hidden = self.head, self.shape.hidden
        inputs = len(head.taps) * head.target_hidden
        yield "fc.weight", (hidden, inputs)
        for name in _EAGLE_NORMS:
            yield name, (hidden,)
        yield from super().expected()
        for name in self._input_norms:
            yield name, (inputs if head.norm_before_fc else head.target_hidden,)
        if head.vocab != self.shape.vocab:
            yield "d2t", (head.vocab,)
        if hidden != head.target_hidden or head.vocab != self.shape.vocab:
            yield "lm_head.weight", (head.vocab, hidden)
        if hidden != head.target_hidden:
            yield "model.embed_tokens.weight", (self.shape.vocab, hidden)

    def _layer_sizes(self, index: int) -> Sizes:
        sizes = super()._layer_sizes(index)
        wide = (f"self_attn.{x}_proj.weight" for x in ("" if index else "qkv"))
        return sizes | {name: (sizes[name][0], 2 * sizes[name][1]) for name in wide}

    @property
    def _input_norms(self) -> list[str]:
        """Return the names of the norms of the target's rows."""
        if self.head.norm_before_fc:
            return ["input_norm.weight"]
        return [f"fc_norm.{i}.weight" for i in range(len(self.head.taps))] if self.head.fc_norm else []

    def _head(self, read: TensorReader, reader: WeightReader, layers: list[Layer], *of: Any) -> Eagle3:
        (own, target, _), found = of, self.sizes()
        norms = [reader.norm(name) for name in _EAGLE_NORMS]
        has_embedding, has_head = ("model.embed_tokens.weight" in found, "lm_head.weight" in found)
        return Eagle3(
            *(*of, reader.linear(False, "fc"), norms, layers),
            embedding=reader.table("model.embed_tokens").rows if has_embedding else target.embedding,
            head=reader.linear(False, "lm_head") if has_head else target.output_head,
            targets=_targets(read, own, found, self.path).to(target.device) if "d2t" in found else None,
            input_norms=[reader.norm(name) for name in self._input_norms],
        )


class MTPCheckpoint(HeadCheckpoint):
    """The MTP head in a target's own checkpoint, whose other tensors are the target's."""

    shape_of = staticmethod(mtp_shape)

    @staticmethod
    def _name(name: str) -> str:
        own = name.removeprefix("mtp.")
        return "" if own == name else f"model.{own}" if own.startswith(("layers.", "norm.")) else own

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.shape.hidden
        yield "fc.weight", (hidden, 2 * hidden)
        for name in _MTP_NORMS:
            yield name, (hidden,)
        yield from super().expected()

    def _head(self, read: TensorReader, reader: WeightReader, layers: list[Layer], *of: Any) -> MTP:
        norms = [reader.norm(name) for name in _MTP_NORMS]
        return MTP(*(*of, reader.linear(False, "fc"), norms, layers))


def _targets(read: Any, own: HeadShape, found: Sizes, path: Path) -> Tensor:
    """Return the target's ids of a head's tokens `[vocab]`.

    d2t has their differences to the head's own ids, or in some files the ids themselves; t2d has which ids there are.
    Raises CheckpointError.
    """
    stored = read("d2t").long()
    added = stored + torch.arange(own.vocab)
    for ids in (added, stored):
        is_valid = bool(((ids >= 0) & (ids < own.layers.vocab)).all()) and len(ids.unique()) == len(ids)
        if is_valid and ("t2d" not in found or bool(read("t2d")[ids].all())):
            return ids
    raise CheckpointError(
        f"{path}: d2t does not give each of the drafter's tokens one of the target's", "fetch it again"
    )


def is_drafter_folder(path: Path) -> bool:
    """Return whether a path is the folder of a drafter of one target, and not of a model. Raises CheckpointError."""
    return path.is_dir() and is_head(read_json(path / "config.json"))


def checked_drafter(path: Path, target: ModelShape, is_mtp: bool = False) -> HeadCheckpoint:
    """Return a drafter of a target that has been checked; `is_mtp`: the head in the target's own checkpoint.

    Raises SettingsError if it is for another target, UnsupportedModel, CheckpointError, ModelNotFound.
    """
    checkpoint = (MTPCheckpoint if is_mtp else Eagle3Checkpoint)(path, target)
    checkpoint.check()
    return checkpoint
