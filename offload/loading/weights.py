"""Loads a checkpoint's tensors into the decoder's fused weights, on one device in one dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..decoder import Layer, Model
from ..kernels.ops import Linear, Operations, TorchOperations
from ..kernels.quantized import QuantizedTensor
from ..offloading import StreamedLayers, WeightTier
from ..parallel import ALONE, Group, Share
from ..parallel.linear import GatheredLinear, SummedLinear, Table
from .safetensors import Checkpoint, TensorReader

Progress = Callable[[int, int], None]  # layers done, layers in all


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
        reader = _WeightReader(read, dtype, device, do, group, share)
        embedding, head = _load_ends(reader, shape)
        resident = shape.layers if tier is None else min(tier.resident, shape.layers)
        outside = _WeightReader(read, dtype, torch.device("cpu"), do, group, share)
        loaded = []
        for index in range(shape.layers):
            loaded.append(_load_layer(reader if index < resident else outside, shape, f"model.layers.{index}."))
            progress(index + 1, shape.layers)
        layers = loaded
        if resident < shape.layers:
            layers = StreamedLayers(loaded[:resident], loaded[resident:], tier.link, device)
        return Model(shape, do, embedding, layers, reader.stacked("model.norm.weight"), head, group)


def _load_ends(reader: _WeightReader, shape: ModelShape) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """Load the embedding and the output head; a tied table is stored once, in the head's layout."""
    if shape.tied_embeddings:
        head = reader.gathered(reader.linear(False, "model.embed_tokens"))
        return head.rows, head
    return reader.gathered(reader.table("model.embed_tokens")).rows, reader.gathered(reader.linear(False, "lm_head"))


def load_layers(
    checkpoint: Checkpoint, model: Model, share: Share | None, indices: Sequence[int] | None = None
) -> Iterator[Layer]:
    """Yield all layers of a model, or those of some `indices`, from another checkpoint of its shape."""
    with checkpoint.tensors() as read:
        reader = _WeightReader(read, model.dtype, model.device, model.operations, model.group, share)
        for index in range(model.shape.layers) if indices is None else indices:
            yield _load_layer(reader, model.shape, f"model.layers.{index}.")


def load_head(checkpoint: Checkpoint, model: Model, share: Share | None) -> Linear:
    """Return the output head of a model from another checkpoint of its shape."""
    name = "model.embed_tokens" if model.shape.tied_embeddings else "lm_head"
    with checkpoint.tensors() as read:
        reader = _WeightReader(read, model.dtype, model.device, model.operations, model.group, share)
        return reader.gathered(reader.linear(False, name))


def _load_layer(reader: _WeightReader, shape: ModelShape, prefix: str) -> Layer:
    """Load the fused weights of one layer."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    norms = [reader.stacked(f"{attention}{x}_norm.weight") if shape.qk_norm else None for x in "qk"]
    return Layer(
        input_norm=reader.stacked(f"{prefix}input_layernorm.weight"),
        qkv=reader.linear(shape.qkv_bias, *(f"{attention}{x}_proj" for x in "qkv")),
        q_norm=norms[0],
        k_norm=norms[1],
        o=reader.summed(shape.o_bias, f"{attention}o_proj"),
        mlp_norm=reader.stacked(f"{prefix}post_attention_layernorm.weight"),
        gate_up=reader.linear(shape.mlp_bias, f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=reader.summed(shape.mlp_bias, f"{mlp}down_proj"),
    )


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
        reader = _WeightReader(read, dtype, device, operations, group, share)
        embedding, head = _load_ends(reader, shape)
        layers = (_load_layer(reader, shape, f"model.layers.{index}.") for index in range(shape.layers))
        yield Model(shape, operations, embedding, layers, reader.stacked("model.norm.weight"), head, group)


class _WeightReader:
    """Copies tensors, or a rank's part of them, from the checkpoint's mapped files to a device, one at a time."""

    def __init__(
        self,
        read: TensorReader,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        group: Group,
        share: Share | None,
    ) -> None:
        self._read = read
        self._operations = operations
        self._dtype = dtype
        self._device = device
        self._group, self._share = group, share

    def stacked(self, *names: str) -> Tensor:
        """Return the tensors concatenated along their rows, in newly allocated memory."""
        parts = [self._read(name, self._share and self._share.part(name)) for name in names]
        rows = sum(len(part) for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        for target, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
            target.copy_(part)
        return whole

    def linear(self, bias: bool, *names: str) -> Linear:
        """Return the named linears as one, with their rows concatenated; quantised if they can be."""
        biases = self.stacked(*(f"{name}.bias" for name in names)) if bias else None
        parts = [self._quantized(f"{name}.weight") for name in names]
        if any(part is not None for part in parts):
            pairs = zip(parts, names, strict=True)
            weights = [self.stacked(f"{name}.weight") if part is None else part for part, name in pairs]
            return self._operations.quantized_linear(weights, biases)
        return self._operations.linear(self.stacked(*(f"{name}.weight" for name in names)), biases)

    def table(self, name: str) -> Table | Linear:
        """Return an embedding table."""
        part = self._quantized(f"{name}.weight")
        return Table(self.stacked(f"{name}.weight")) if part is None else self._operations.quantized_linear([part])

    def _quantized(self, name: str) -> QuantizedTensor | None:
        """Return a weight, or this rank's part of it, as it is stored; None if it has to be dequantised."""
        if not self._operations.serves_quantized(self._dtype) or (whole := self._read.quantized(name)) is None:
            return None
        rows, *columns = (self._share and self._share.part(name)) or (slice(None),)
        part = whole.rows(rows) if not columns else whole.rows(rows).columns(*columns)
        return None if part is None else part.to(self._device)

    def summed(self, bias: bool, name: str) -> Linear:
        """Return a linear split by columns among the ranks; its bias is added once."""
        if self._share is None:
            return self.linear(bias, name)
        return SummedLinear(self.linear(bias and self._group.rank == 0, name), self._group)

    def gathered(self, table: Linear | Table) -> Linear | Table:
        """Return a table over the vocabulary, which may be split by rows among the ranks."""
        if self._share is None or not self._share.splits_vocab:
            return table
        return GatheredLinear(table, self._group, self._share.vocab)
