"""Models of real shapes with weights that are fake tensors on `GPU`; to be loaded within `fake_cuda`."""

from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig

from offload.architecture.config import ModelShape, shape_from_config
from offload.decoder import Model
from offload.kernels.ops import TorchOperations
from offload.loading.tensor_checks import expected_sizes
from offload.loading.weights import load_model
from offload.offloading import WeightTier
from tests.support.fake_cuda import GPU

SHAPES = {"7B": (32, 11008, 32000), "8B": (8, 14336, 128256)}  # KV heads, MLP, vocabulary


class _Checkpoint:
    """Weights of a shape, without values."""

    path = Path("fake")

    def __init__(self, shape: ModelShape) -> None:
        self.shape, self._sizes = shape, expected_sizes(shape)

    @contextmanager
    def tensors(self):
        yield lambda name, part=None: torch.empty(self._sizes[name], dtype=torch.bfloat16, device=GPU)


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


def load_fake(shape: ModelShape, tier: WeightTier | None = None) -> Model:
    """Return a model of the shape on torch's operations in bf16."""
    return load_model(_Checkpoint(shape), torch.bfloat16, GPU, lambda done, total: None, TorchOperations(), tier)
