"""Opens, checks and loads trained heads: their own folders, and the MTP head in a target's checkpoint."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.config_checks import check_of_config
from ..architecture.head_shape import EAGLE3, HeadDimensions, HeadShape, eagle3_shape, is_head, mtp_shape
from ..architecture.weight_formats import format_of
from ..errors import CheckpointError
from ..kernels.ops import Operations
from ..model.decoder import Model
from ..model.heads import MTP, Eagle3, Head
from ..parallel import ALONE
from .checkpoint_json import read_json
from .formats.layer_tensors import Sizes, checkpoint_sizes, layer_sizes
from .formats.quantization import QuantizingReader
from .formats.safetensors import FolderCheckpoint, TensorReader, weight_files
from .formats.tensor_checks import check_sizes
from .weight_reader import WeightReader
from .weights import load_layer

_LAYER = re.compile(r"midlayer\.|layers\.(\d+)\.")
_EAGLE_NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.0.hidden_norm.weight", "model.norm.weight")
_MTP_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "model.norm.weight")


def is_head_folder(path: Path) -> bool:
    """Return whether a path is the folder of a head, and not of a model. Raises CheckpointError."""
    return path.is_dir() and is_head(read_json(path / "config.json"))


class HeadCheckpoint(FolderCheckpoint):
    """A head in a folder of its own, or within the target's: a checkpoint with the decoder's names of tensors."""

    def __init__(self, path: Path, target: ModelShape, is_mtp: bool = False) -> None:
        """Read the config of a head for a target.

        Raises SettingsError if it is for another one, UnsupportedModel, CheckpointError, ModelNotFound.
        """
        config = read_json(path / "config.json") if path.is_dir() else {}
        read = mtp_shape if is_mtp else eagle3_shape
        self.head: HeadShape = read(config, target, check_of_config(path / "config.json"))
        self._open(path, self.head.layers, _mtp_name if is_mtp else _eagle_name)

    def _open(self, path: Path, shape: ModelShape, name: Callable[[str], str]) -> None:
        """Open the files of weights; `name` returns the decoder's name of a tensor, "" for one that is not read."""
        self.path, self.generation, self.shape = path, {}, shape
        self._name, self._reads = name, bool
        self._quantized = self._layout = None
        self.quantization = ""
        self._files = weight_files(path)

    @cached_property
    def dimensions(self) -> HeadDimensions:
        """Return its dimensions, with the parameters that are there."""
        found, dims = self.sizes(), self.head.dimensions
        more = prod(found.get("model.embed_tokens.weight", (0,)))
        return replace(dims, more=dims.more + more, shares_head="lm_head.weight" not in found)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether its folder has a tokenizer of its own, which should be the target's."""
        return self.head.kind == EAGLE3 and (self.path / "tokenizer.json").is_file()

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and sizes of the tensors that must be there."""
        head, hidden = self.head, self.shape.hidden
        inputs = 2 * hidden if head.kind != EAGLE3 else len(head.taps) * head.target_hidden
        yield "fc.weight", (hidden, inputs)
        for name in _EAGLE_NORMS if head.kind == EAGLE3 else _MTP_NORMS:
            yield name, (hidden,)
        yield from self._of_layers()
        for name in self.input_norms:
            yield name, (inputs if head.norm_before_fc else head.target_hidden,)
        if head.mask_token is not None:
            yield "mask_hidden", (1, inputs)
        if head.kind == EAGLE3 and head.vocab != self.shape.vocab:
            yield "d2t", (head.vocab,)
        if head.kind == EAGLE3 and (hidden != head.target_hidden or head.vocab != self.shape.vocab):
            yield "lm_head.weight", (head.vocab, hidden)
        if head.kind == EAGLE3 and hidden != head.target_hidden:
            yield "model.embed_tokens.weight", (self.shape.vocab, hidden)

    def _of_layers(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for index in range(self.shape.layers):
            for name, size in self._layer_sizes(index).items():
                yield f"model.layers.{index}.{name}", size

    def _layer_sizes(self, index: int) -> Sizes:
        sizes = checkpoint_sizes(self.shape, layer_sizes(self.shape, self.shape.spec(index)))
        if self.head.kind != EAGLE3 or index:
            return sizes
        wide = (f"self_attn.{x}_proj.weight" for x in "qkv")
        return sizes | {name: (sizes[name][0], 2 * sizes[name][1]) for name in wide}

    @property
    def input_norms(self) -> list[str]:
        """Return the names of the norms of the target's rows."""
        if self.head.norm_before_fc:
            return ["input_norm.weight"]
        return [f"fc_norm.{i}.weight" for i in range(len(self.head.taps))] if self.head.fc_norm else []

    @contextmanager
    def opened(
        self, target: Model, operations: Operations, level: str | None
    ) -> Iterator[tuple[TensorReader, WeightReader]]:
        """Yield what reads its tensors, and its weights for a target; matrices are rounded to a `level`, if any."""
        with self.tensors() as read:
            sizes = self.sizes().items() if level is not None else ()
            formats = {name: format_of(str(level), name, size) for name, size in sizes if name.endswith(".weight")}
            rounding = QuantizingReader(read, {name: kind for name, kind in formats.items() if kind is not None})
            yield read, WeightReader(rounding, target.dtype, target.device, operations, ALONE, None, self.shape)

    def check(self) -> None:
        """Check by the headers that every tensor is there with its size. Raises CheckpointError."""
        check_sizes(f"{self.path}: the drafter", self.expected(), self.sizes())

    def load(self, target: Model, operations: Operations, level: str | None = None) -> Head:
        """Load the drafter of a loaded target; it has been checked.

        Its matrices are rounded to a `level` (q4, q5, q6, q8), if one is given: no output depends on it.
        """
        own, found = self.head, self.sizes()
        with self.opened(target, operations, level) as (read, reader):
            layers = [load_layer(reader, own.layers, index) for index in range(own.layers.layers)]
            names = _EAGLE_NORMS if own.kind == EAGLE3 else _MTP_NORMS
            embedding, feature, output = (reader.norm(name) for name in names)
            weights = own, target, operations, reader.linear(False, "fc"), (embedding, feature, output), layers
            if own.kind != EAGLE3:
                return MTP(*weights)
            has_embedding, has_head = ("model.embed_tokens.weight" in found, "lm_head.weight" in found)
            return Eagle3(
                *weights,
                embedding=reader.table("model.embed_tokens").rows if has_embedding else target.embedding,
                head=reader.linear(False, "lm_head") if has_head else target.output_head,
                targets=_targets(read, own, found, self.path).to(target.device) if "d2t" in found else None,
                mask=None if own.mask_token is None else reader.stacked("mask_hidden"),
                input_norms=[reader.norm(name) for name in self.input_norms],
            )


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


def _eagle_name(name: str) -> str:
    """Return the decoder's name of a tensor of an EAGLE-3 head."""
    name = name.removeprefix("model.")
    if match := _LAYER.match(name):
        return f"model.layers.{match[1] or 0}.{name[match.end() :]}"
    return f"model.{name}" if name in ("norm.weight", "embed_tokens.weight") else name


def _mtp_name(name: str) -> str:
    """Return the decoder's name of a tensor of an MTP head; nothing for the target's."""
    own = name.removeprefix("mtp.")
    return "" if own == name else f"model.{own}" if own.startswith(("layers.", "norm.")) else own
