"""Opens trained drafters of a target, of whichever kind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..architecture.assistant_shape import AssistantShape, assistant_shape, is_assistant
from ..architecture.config import ModelShape
from ..architecture.dflash_shape import DFlashShape, dflash_shape, is_dflash
from ..architecture.head_shape import is_head
from ..errors import UnsupportedModel
from ..model.assistant import Assistant
from ..model.dflash import DFlash
from ..model.layer import Layer
from .checkpoint_json import read_json
from .formats.safetensors import TensorReader
from .heads import Eagle3Checkpoint, HeadCheckpoint, MTPCheckpoint
from .weight_reader import WeightReader

_CENTROIDS, _TOKENS = "masked_embedding.centroids", "masked_embedding.token_ordering"
_DFLASH_NORMS = ("hidden_norm.weight", "model.norm.weight")
_LATER = ("candidate_selector", "attention_conv", "mlp_conv")  # tensors of DFlash2
_MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")


class AssistantCheckpoint(HeadCheckpoint):
    """An assistant of Gemma 4 in a folder of its own."""

    head: AssistantShape
    shape_of, _name = staticmethod(assistant_shape), staticmethod(str)

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        head, hidden = self.head, self.shape.hidden
        yield "pre_projection.weight", (hidden, 2 * head.target_hidden)
        yield "post_projection.weight", (head.target_hidden, hidden)
        yield "model.embed_tokens.weight", (self.shape.vocab, hidden)
        yield "model.norm.weight", (hidden,)
        yield from super().expected()
        if head.centroids:
            yield f"{_CENTROIDS}.weight", (head.centroids, hidden)
            yield _TOKENS, (self.shape.vocab,)

    def _head(self, read: TensorReader, reader: WeightReader, layers: list[Layer], *of: Any) -> Assistant:
        norm, centroids = reader.norm("model.norm.weight"), None
        if self.head.centroids:
            tokens = read(_TOKENS).to(of[1].device, torch.long).unflatten(0, (self.head.centroids, -1))
            centroids = reader.linear(False, _CENTROIDS), tokens
        return Assistant(
            *(*of, reader.linear(False, "pre_projection"), (norm, norm, norm), layers),
            post=reader.linear(False, "post_projection"),
            head=reader.linear(False, "model.embed_tokens"),
            centroids=centroids,
        )


class DFlashCheckpoint(HeadCheckpoint):
    """A DFlash or DSpark drafter in a folder of its own. Copies of the target's embedding and head are not read."""

    head: DFlashShape
    shape_of = staticmethod(dflash_shape)

    @staticmethod
    def _name(name: str) -> str:
        name = name.removeprefix("model.")
        return f"model.{name}" if name.startswith(("layers.", "norm.")) else name

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.shape.hidden
        yield "fc.weight", (hidden, len(self.head.taps) * self.head.target_hidden)
        for name in _DFLASH_NORMS:
            yield name, (hidden,)
        yield from super().expected()
        for name in _MARKOV if self.head.markov else ():
            yield f"{name}.weight", (self.shape.vocab, self.head.markov)

    def check(self) -> None:
        if later := [name for name in self.sizes() if any(part in name for part in _LATER)]:
            raise UnsupportedModel(f"DFlash2 ({later[0]}) is not supported", "draft with a DFlash or DSpark drafter")
        super().check()

    def _head(self, read: TensorReader, reader: WeightReader, layers: list[Layer], *of: Any) -> DFlash:
        feature, output = (reader.norm(name) for name in _DFLASH_NORMS)
        before, bias = _MARKOV
        markov = (reader.table(before).rows, reader.linear(False, bias)) if self.head.markov else None
        return DFlash(*of, reader.linear(False, "fc"), (feature, feature, output), layers, markov=markov)


def _kind_of(path: Path) -> type[HeadCheckpoint] | None:
    """Return what opens the drafter in a folder; None for a model. Raises CheckpointError."""
    config = read_json(path / "config.json")
    kinds = {AssistantCheckpoint: is_assistant, DFlashCheckpoint: is_dflash, Eagle3Checkpoint: is_head}
    return next((kind for kind, is_kind in kinds.items() if is_kind(config)), None)


def is_drafter_folder(path: Path) -> bool:
    """Return whether a path is the folder of a drafter of one target, and not of a model. Raises CheckpointError."""
    return path.is_dir() and _kind_of(path) is not None


def checked_drafter(path: Path, target: ModelShape, is_mtp: bool = False) -> HeadCheckpoint:
    """Return a drafter of a target that has been checked; `is_mtp`: the head in the target's own checkpoint.

    Raises SettingsError if it is for another target, UnsupportedModel, CheckpointError, ModelNotFound.
    """
    kind = MTPCheckpoint if is_mtp else _kind_of(path) or Eagle3Checkpoint
    checkpoint = kind(path, target)
    checkpoint.check()
    return checkpoint
