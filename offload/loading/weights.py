"""Loads a checkpoint's tensors into the decoder's fused weights, on one device in one dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..kernels.ops import Linear, Operations, TorchOperations
from ..model.decoder import Model
from ..model.layer import Layer
from ..model.row_inputs import LayerEmbeddings
from ..parallel import ALONE, Group, Share
from ..weight_offloading.expert_tier import ExpertMover
from ..weight_offloading.layer_stream import StreamedLayers, WeightTier
from .formats.safetensors import Checkpoint
from .layers import load_layer, load_layer_apart
from .weight_reader import WeightReader

Progress = Callable[[int, int], None]  # layers done, layers in all
_CPU = torch.device("cpu")


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    operations: Operations | None = None,
    tier: WeightTier | None = None,
    group: Group = ALONE,
    share: Share | None = None,
) -> Model:
    """Read the weights of a checkpoint that `check_tensors` has passed.

    Args:
        progress: called after every layer.
        operations: defines the layout of the weights; None for torch's.
        tier: which layers' weights do not stay on the device; None for none.
        group: the ranks that share the model.
        share: the part of the model that this rank of `group` loads; None for all of it.
    """
    shape, do = checkpoint.shape if share is None else share.shape, operations or TorchOperations()
    with checkpoint.tensors() as read:

        def reader_to(device: torch.device, operations: Operations) -> WeightReader:
            return WeightReader(read, dtype, device, operations, group, share, checkpoint.shape)

        reader, outside = reader_to(device, do), reader_to(_CPU, do)
        embedding, head = _load_ends(reader, shape)
        resident = shape.layers if tier is None else min(tier.resident, shape.layers)
        mover = None if tier is None or tier.experts is None else ExpertMover(tier.experts, device)
        loaded = []
        for index in range(shape.layers):
            if mover is not None and shape.spec(index).is_sparse and mover.takes_next():
                host = reader_to(_CPU, mover.operations(do))
                loaded.append(load_layer_apart(reader, host, shape, index, mover))
            else:
                loaded.append(load_layer(reader if index < resident else outside, shape, index))
            progress(index + 1, shape.layers)
        layers = loaded
        if resident < shape.layers:
            layers = StreamedLayers(loaded[:resident], loaded[resident:], tier.link, device)
        norm, bias = _final_norm(reader, shape)
        own = _layer_embeddings(reader, outside, shape)
        model = Model(shape, do, embedding, layers, norm, head, group, bias, dtype, own)
        if mover is not None:
            mover.finish()
            model.experts_run = mover.statistics.event
        return model


def _load_ends(reader: WeightReader, shape: ModelShape) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """Load the embedding and the output head; a tied table is stored once, in the head's layout."""
    if shape.tied_embeddings:
        head = reader.gathered(reader.linear(False, "model.embed_tokens"))
        return head.rows, head
    return reader.gathered(reader.table("model.embed_tokens")).rows, reader.gathered(reader.linear(False, "lm_head"))


def _final_norm(reader: WeightReader, shape: ModelShape) -> tuple[Tensor, Tensor | None]:
    """Load weight and bias of the norm behind the last layer."""
    bias = reader.norm("model.norm.bias") if shape.specs[0].norm_bias else None
    return reader.norm("model.norm.weight"), bias


def _layer_embeddings(reader: WeightReader, outside: WeightReader, shape: ModelShape) -> LayerEmbeddings | None:
    """Load what gives each layer its own embeddings, if they have them; the table by the reader to host memory."""
    if not shape.layer_input:
        return None
    return LayerEmbeddings(
        table=outside.table("model.embed_tokens_per_layer"),
        projection=reader.linear(False, "model.per_layer_model_projection"),
        norm=reader.wide("model.per_layer_projection_norm.weight"),
    )


def load_layers(
    checkpoint: Checkpoint, model: Model, share: Share | None, indices: Sequence[int] | None = None
) -> Iterator[Layer]:
    """Yield all layers of a model, or those of some `indices`, from another checkpoint of its shape."""
    with checkpoint.tensors() as read:
        reader = WeightReader(read, model.dtype, model.device, model.operations, model.group, share, checkpoint.shape)
        for index in range(model.shape.layers) if indices is None else indices:
            yield load_layer(reader, model.shape, index)


def load_head(checkpoint: Checkpoint, model: Model, share: Share | None) -> Linear:
    """Return the output head of a model from another checkpoint of its shape."""
    name = "model.embed_tokens" if model.shape.tied_embeddings else "lm_head"
    with checkpoint.tensors() as read:
        reader = WeightReader(read, model.dtype, model.device, model.operations, model.group, share, checkpoint.shape)
        return reader.gathered(reader.linear(False, name))


@contextmanager
def streamed_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations,
    group: Group = ALONE,
    share: Share | None = None,
) -> Iterator[Model]:
    """Yield a model for one forward pass, which reads each layer when it comes to it, so that one is in memory."""
    shape = checkpoint.shape if share is None else share.shape
    with checkpoint.tensors() as read:
        reader = WeightReader(read, dtype, device, operations, group, share, checkpoint.shape)
        embedding, head = _load_ends(reader, shape)
        layers = (load_layer(reader, shape, index) for index in range(shape.layers))
        norm, bias = _final_norm(reader, shape)
        own = _layer_embeddings(reader, reader, shape)
        yield Model(shape, operations, embedding, layers, norm, head, group, bias, dtype, own)
