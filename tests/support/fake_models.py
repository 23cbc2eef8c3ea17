"""Models of real shapes with weights that are fake tensors on `GPU`; to be loaded within `fake_cuda`."""

from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig

from offload.architecture.config import ModelShape
from offload.architecture.hf_config import shape_from_config
from offload.architecture.weight_formats import QuantizedFormat, format_of
from offload.kernels.ops import CudaOperations
from offload.kernels.quantized import QuantizedTensor
from offload.loading.formats.tensor_checks import expected_tensors
from offload.loading.weights import load_model
from offload.model.decoder import Model
from offload.parallel import ALONE, Group, split
from offload.weight_offloading.layer_stream import WeightTier
from tests.support.fake_cuda import GPU

SHAPES = {"7B": (32, 11008, 32000), "8B": (8, 14336, 128256)}  # KV heads, MLP, vocabulary


class _Weight(NamedTuple):
    """A weight of a size, without values, rounded to a kind or not."""

    size: tuple[int, ...]
    kind: QuantizedFormat | None

    def read(self, part=None):
        whole = torch.empty(self.size, dtype=torch.bfloat16, device=GPU)
        return whole if part is None else whole[part].clone()

    def quantized(self):
        return None if self.kind is None else _quantized(self.kind, *self.size)


class _Checkpoint:
    """Weights of a shape, without values; rounded to a level or not."""

    path = Path("fake")

    def __init__(self, shape: ModelShape, level: str | None) -> None:
        self.shape, sizes = shape, dict(expected_tensors(shape))
        kinds = {name: None if level is None else format_of(level, name, size) for name, size in sizes.items()}
        self._weights = {name: _Weight(size, kinds[name]) for name, size in sizes.items()}

    def close(self) -> None:
        """Do nothing: there are no files."""

    @contextmanager
    def opened(self):
        yield self._weights


def _quantized(kind: QuantizedFormat, rows: int, inputs: int) -> QuantizedTensor:
    codes = torch.empty((rows, inputs // 32, 32), dtype=torch.int8 if kind.bits == 8 else torch.uint8)
    number = torch.int8 if kind.nested else torch.float16
    numbers = [torch.empty((rows, inputs // kind.group), dtype=number)]
    numbers.append(torch.empty((rows, inputs // 32), dtype=number) if kind.has_minimum else None)
    for present in (kind.nested, kind.nested and kind.has_minimum):
        numbers.append(torch.empty((rows, inputs // 256), dtype=torch.float16) if present else None)
    return QuantizedTensor(kind, codes, *numbers)


def fake_shape(name: str, layers: int, **changes) -> ModelShape:
    """Return the shape of Llama-2-7B or Llama-3.1-8B with fewer layers."""
    kv_heads, intermediate, vocab = SHAPES[name]
    settings = {
        "num_hidden_layers": layers,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
    }
    return shape_from_config(LlamaConfig(**settings | changes).to_dict(), {})


def load_fake(
    shape: ModelShape, tier: WeightTier | None = None, level: str | None = None, group: Group = ALONE
) -> Model:
    """Return a model of the shape on torch's operations in bf16, with weights rounded to a level.

    Of several ranks it is the share of the one in `group`.
    """
    operations, share = CudaOperations(), None if group.size == 1 else split(shape, group.rank, group.size)
    checkpoint = _Checkpoint(shape, level)
    return load_model(checkpoint, torch.bfloat16, GPU, lambda done, total: None, operations, tier, group, share)
