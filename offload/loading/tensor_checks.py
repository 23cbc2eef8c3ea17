"""Lists the tensors that a checkpoint must contain, and checks its headers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..architecture.config import ModelShape
from ..errors import CheckpointError
from ..units import counted
from .safetensors import Checkpoint

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def expected_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and size of every tensor that a checkpoint of this shape must contain.

    They are yielded lazily: the number of layers comes from a config that may be wrong by orders of magnitude.
    """
    hidden, width = shape.hidden, shape.intermediate
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, shape.qkv_bias),
        "self_attn.k_proj": (kv, hidden, shape.qkv_bias),
        "self_attn.v_proj": (kv, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, q, shape.o_bias),
        "mlp.gate_proj": (width, hidden, shape.mlp_bias),
        "mlp.up_proj": (width, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, width, shape.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, into) for name, (out, into, _) in linears.items()}
    layer |= {f"{name}.bias": (out,) for name, (out, _, bias) in linears.items() if bias}
    layer |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if shape.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (shape.head_dim,) for x in "qk"}
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for i in range(shape.layers):
        yield from ((f"model.layers.{i}.{name}", size) for name, size in layer.items())
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab, hidden)


def expected_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the name and size of every tensor that a checkpoint of this shape must contain."""
    return dict(expected_tensors(shape))


def check_tensors(checkpoint: Checkpoint) -> None:
    """Check by the headers that every expected tensor is there with its size. Raises CheckpointError."""
    found = checkpoint.sizes()
    _check_layers(checkpoint, found)
    for name, size in expected_tensors(checkpoint.shape):
        if name not in found:
            raise CheckpointError(f"{checkpoint.path} lacks the tensor {name}", "fetch the model again")
        if found[name] != size:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {list(found[name])}, its config asks for {list(size)}",
                "config.json and the weights do not belong together; fetch the model again",
            )


def _check_layers(checkpoint: Checkpoint, found: Iterable[str]) -> None:
    """Raise CheckpointError for weights of more layers than the config says: the model would be run without them."""
    layers = checkpoint.shape.layers
    most = max((int(match[1]) + 1 for match in map(_LAYER.match, found) if match), default=0)
    if most > layers:
        raise CheckpointError(
            f"{checkpoint.path} has weights of {counted(most, 'layer')}, its config says {layers:,}",
            "correct num_hidden_layers in config.json, or fetch the model again",
        )
