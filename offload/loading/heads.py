"""Opens, checks and loads trained heads: EAGLE-3 in folders of their own, and the MTP head in a target's checkpoint."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..architecture.checkpoint_json import read_json
from ..architecture.config import ModelShape
from ..architecture.config_checks import check_of_config
from ..architecture.head_shape import HeadDimensions, HeadShape, eagle3_shape, is_head, mtp_shape
from ..errors import CheckpointError
from ..kernels.ops import Operations
from ..model.decoder import Model
from ..model.heads import MTP, Eagle3, Head
from ..parallel import ALONE
from .formats.checkpoint import rounded
from .formats.layer_tensors import checkpoint_sizes, layer_sizes
from .formats.safetensors import FolderCheckpoint
from .formats.tensor_checks import check_sizes
from .weight_reader import WeightReader
from .weights import load_layer

_LAYER = re.compile(r"midlayer\.|layers\.(\d+)\.")
_FC, _NORM, _EMBEDDING, _HEAD = "fc.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
_EAGLE_NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.0.hidden_norm.weight", _NORM)
_MTP_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", _NORM)


class HeadCheckpoint(FolderCheckpoint):
    """A drafter of one target, with the decoder's names of tensors: EAGLE-3, or the MTP head of a whole model."""

    def __init__(self, path: Path, target: ModelShape, is_mtp: bool) -> None:
        """Read the config of a drafter for a target.

        Raises SettingsError if it is for another one, UnsupportedModel, CheckpointError, ModelNotFound.
        """
        config = read_json(path / "config.json") if path.is_dir() else {}
        read_shape = mtp_shape if is_mtp else eagle3_shape
        self.head: HeadShape = read_shape(config, target, check_of_config(path / "config.json"))
        self.generation, self.shape, self.is_mtp = {}, self.head.layers, is_mtp
        self._open(path, _mtp_name if is_mtp else _eagle_name, bool)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether its folder has a tokenizer of its own, which should be the target's."""
        return not self.is_mtp and (self.path / "tokenizer.json").is_file()

    @cached_property
    def dimensions(self) -> HeadDimensions:
        """Its dimensions, with the parameters that are there."""
        dimensions, sizes = self.head.dimensions, self.sizes()
        if self.is_mtp:
            return dimensions
        more = dimensions.more + prod(sizes.get(_EMBEDDING, (0,)))
        return replace(dimensions, more=more, shares_head=_HEAD not in sizes)

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and sizes of the tensors that must be there."""
        head, hidden = self.head, self.shape.hidden
        inputs = 2 * hidden if self.is_mtp else len(head.taps) * head.target_hidden
        yield _FC, (hidden, inputs)
        for name in self._norms:
            yield name, (hidden,)
        for index in range(self.shape.layers):
            sizes = checkpoint_sizes(self.shape, layer_sizes(self.shape, self.shape.spec(index)))
            for name, size in sizes.items():
                is_wide = not self.is_mtp and index == 0 and re.match(r"self_attn\.[qkv]_proj\.weight", name)
                yield f"model.layers.{index}.{name}", (size[0], 2 * size[1]) if is_wide else size
        if self.is_mtp:
            return
        for name in self._input_norms:
            yield name, (inputs if head.norm_before_fc else head.target_hidden,)
        if head.vocab != self.shape.vocab:
            yield "d2t", (head.vocab,)
        if hidden != head.target_hidden or head.vocab != self.shape.vocab:
            yield _HEAD, (head.vocab, hidden)
        if hidden != head.target_hidden:
            yield _EMBEDDING, (self.shape.vocab, hidden)

    @property
    def _norms(self) -> tuple[str, str, str]:
        return _MTP_NORMS if self.is_mtp else _EAGLE_NORMS

    @property
    def _input_norms(self) -> list[str]:
        """Return the names of the norms of the target's rows."""
        if self.head.norm_before_fc:
            return ["input_norm.weight"]
        return [f"fc_norm.{i}.weight" for i in range(len(self.head.taps))] if self.head.fc_norm else []

    def load(self, target: Model, operations: Operations, level: str | None = None) -> Head:
        """Load the drafter of a loaded target; it has been checked.

        Its matrices are rounded to a `level` (q4, q5, q6, q8), if one is given: no output depends on it.
        """
        with self.opened() as stored:
            weights = stored if level is None else rounded(stored, level)
            reader = WeightReader(weights, target.dtype, target.device, operations, ALONE, None, self.shape)
            layers = [load_layer(reader, self.shape, index) for index in range(self.shape.layers)]
            embedding, features, output = map(reader.norm, self._norms)
            common = self.head, target, operations, reader.linear(False, "fc"), (embedding, features, output), layers
            if self.is_mtp:
                return MTP(*common)
            return Eagle3(
                *common,
                embedding=reader.table("model.embed_tokens").rows if _EMBEDDING in stored else target.embedding,
                head=reader.linear(False, "lm_head") if _HEAD in stored else target.output_head,
                targets=self._targets().to(target.device) if "d2t" in stored else None,
                input_norms=[reader.norm(name) for name in self._input_norms],
            )

    def _targets(self) -> Tensor:
        """Return the target's ids of a head's tokens `[vocab]`.

        d2t has their differences to the head's own ids, or in some files the ids themselves; t2d has which ids there
        are. Raises CheckpointError.
        """
        stored = self.weights["d2t"].read().long()
        for ids in (stored + torch.arange(self.head.vocab), stored):
            is_valid = bool(((ids >= 0) & (ids < self.shape.vocab)).all()) and len(ids.unique()) == len(ids)
            if is_valid and ("t2d" not in self.weights or bool(self.weights["t2d"].read()[ids].all())):
                return ids
        message = f"{self.path}: d2t does not give each of the drafter's tokens one of the target's"
        raise CheckpointError(message, "fetch it again")


def _eagle_name(name: str) -> str:
    name = name.removeprefix("model.")
    if match := _LAYER.match(name):
        return f"model.layers.{match[1] or 0}.{name[match.end() :]}"
    return f"model.{name}" if name in ("norm.weight", "embed_tokens.weight") else name


def _mtp_name(name: str) -> str:
    """Return the decoder's name of a tensor; "" for one of the target, which is not read."""
    own = name.removeprefix("mtp.")
    return "" if own == name else f"model.{own}" if own.startswith(("layers.", "norm.")) else own


def is_drafter_folder(path: Path) -> bool:
    """Return whether a path is the folder of a drafter of one target, and not of a model. Raises CheckpointError."""
    return path.is_dir() and is_head(read_json(path / "config.json"))


def checked_drafter(path: Path, target: ModelShape, is_mtp: bool = False) -> HeadCheckpoint:
    """Return a drafter of a target that has been checked; `is_mtp`: the head in the target's own checkpoint.

    Raises SettingsError if it is for another target, UnsupportedModel, CheckpointError, ModelNotFound.
    """
    checkpoint = HeadCheckpoint(path, target, is_mtp)
    check_sizes(f"{path}: the drafter", checkpoint.expected(), checkpoint.sizes())
    return checkpoint
