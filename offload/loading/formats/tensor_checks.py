"""Lists the tensors that a checkpoint must contain, checks its headers, and averages their bits. Imports no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from ...architecture.config import ModelShape
from ...architecture.dims import WeightBits
from ...errors import CheckpointError
from ...units import counted
from .checkpoint import Checkpoint
from .layer_tensors import checkpoint_sizes, layer_sizes

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"model\.layers\.\d+\.\w+\.experts\.(\d{1,9})\..+")


def expected_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and size of every tensor that a checkpoint of this shape must contain.

    They are yielded lazily: the number of layers comes from a config that may be wrong by orders of magnitude.
    """
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    layers = {spec: checkpoint_sizes(shape, layer_sizes(shape, spec)) for spec in dict.fromkeys(shape.specs)}
    for i in range(shape.layers):
        yield from ((f"model.layers.{i}.{name}", size) for name, size in layers[shape.spec(i)].items())
    yield "model.norm.weight", (shape.hidden,)
    if width := shape.layer_input:
        yield "model.embed_tokens_per_layer.weight", (shape.vocab, shape.layers * width)
        yield "model.per_layer_model_projection.weight", (shape.layers * width, shape.hidden)
        yield "model.per_layer_projection_norm.weight", (width,)
    if shape.specs[0].norm_bias:
        yield "model.norm.bias", (shape.hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Check by the headers that every expected tensor is there with its size. Raises CheckpointError."""
    found = checkpoint.sizes()
    _check_counts(checkpoint, found)
    check_sizes(f"{checkpoint.path}: the model", expected_tensors(checkpoint.shape), found)


def check_sizes(
    whose: str, expected: Iterable[tuple[str, tuple[int, ...]]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless every expected tensor is there with its size; `whose` names the checkpoint."""
    for name, size in expected:
        if name not in found:
            raise CheckpointError(f"{whose} lacks the tensor {name}", "fetch it again")
        if found[name] != size:
            raise CheckpointError(
                f"{whose}'s {name} is {list(found[name])}, its config asks for {list(size)}",
                "config.json and the weights do not belong together; fetch them again",
            )


def _check_counts(checkpoint: Checkpoint, found: Iterable[str]) -> None:
    """Raise CheckpointError for weights of more layers or experts than the config says: they would be left out."""
    shape = checkpoint.shape
    for pattern, what, count in (
        (_LAYER, "layer", shape.layers),
        (_EXPERT, "expert", None if shape.experts is None else shape.experts.count),
    ):
        most = max((int(match[1]) + 1 for match in map(pattern.match, found) if match), default=0)
        if count is not None and most > count:
            raise CheckpointError(
                f"{checkpoint.path} has weights of {counted(most, what)}, its config says {count:,}",
                "config.json and the weights do not belong together; fetch them again",
            )


_PARTS = ("layers", "outer", "experts")


def average_bits(sizes: Mapping[str, Sequence[int]], quantized: Mapping[str, float], itemsize: int) -> WeightBits:
    """Return the average bits of a weight, inside and outside of the layers, and of experts if those have others.

    `sizes` are those of all tensors, `quantized` the bits of those that are; the others take `itemsize` bytes.
    """
    bits, counts = dict.fromkeys(_PARTS, 0.0), dict.fromkeys(_PARTS, 0)
    for name, size in sizes.items():
        if len(size) > 1:
            part = "outer" if not name.startswith("model.layers.") else "experts" if ".experts." in name else "layers"
            counts[part] += prod(size)
            bits[part] += prod(size) * quantized.get(name, 8 * itemsize)
    layers, outer, experts = (bits[part] / max(counts[part], 1) for part in _PARTS)
    return WeightBits(layers, outer, experts if counts["experts"] and experts != layers else None)
