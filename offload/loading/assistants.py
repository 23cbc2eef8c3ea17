"""Opens, checks and loads the assistants of Gemma 4."""

from collections.abc import Iterator
from pathlib import Path

import torch

from ..architecture.assistant_shape import AssistantShape, assistant_shape
from ..architecture.config import ModelShape
from ..architecture.config_checks import check_of_config
from ..architecture.head_shape import HeadDimensions
from ..kernels.ops import Operations
from ..model.assistant import Assistant
from ..model.decoder import Model
from .checkpoint_json import read_json
from .heads import HeadCheckpoint
from .weights import load_layer

_CENTROIDS, _TOKENS = "masked_embedding.centroids", "masked_embedding.token_ordering"


class AssistantCheckpoint(HeadCheckpoint):
    """An assistant in a folder of its own."""

    head: AssistantShape

    def __init__(self, path: Path, target: ModelShape) -> None:
        """Read the config of an assistant for a target. Raises as HeadCheckpoint."""
        self.head = assistant_shape(read_json(path / "config.json"), target, check_of_config(path / "config.json"))
        self._open(path, self.head.layers, str)

    @property
    def dimensions(self) -> HeadDimensions:
        return self.head.dimensions

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        head, hidden = self.head, self.shape.hidden
        yield "pre_projection.weight", (hidden, 2 * head.target_hidden)
        yield "post_projection.weight", (head.target_hidden, hidden)
        yield "model.embed_tokens.weight", (self.shape.vocab, hidden)
        yield "model.norm.weight", (hidden,)
        yield from self._of_layers()
        if head.centroids:
            yield f"{_CENTROIDS}.weight", (head.centroids, hidden)
            yield _TOKENS, (self.shape.vocab,)

    def load(self, target: Model, operations: Operations, level: str | None = None) -> Assistant:
        own = self.head
        with self.opened(target, operations, level) as (read, reader):
            layers = [load_layer(reader, own.layers, index) for index in range(own.layers.layers)]
            norm, centroids = reader.norm("model.norm.weight"), None
            if own.centroids:
                tokens = read(_TOKENS).to(target.device, torch.long).unflatten(0, (own.centroids, -1))
                centroids = reader.linear(False, _CENTROIDS), tokens
            return Assistant(
                *(own, target, operations, reader.linear(False, "pre_projection"), (norm, norm, norm), layers),
                post=reader.linear(False, "post_projection"),
                head=reader.linear(False, "model.embed_tokens"),
                centroids=centroids,
            )
