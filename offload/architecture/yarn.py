"""Extends a model's context by YaRN (arXiv 2309.00071), by the factor that a request needs.

The quality of answers decreases. Speculative decoding of the extended model is as lossless as of any other.
"""

from dataclasses import replace

from ..errors import UnsupportedModel
from .config import ModelShape


def factor_for(shape: ModelShape, tokens: int) -> int:
    """Return how often the model's context fits into `tokens`, rounded up: similar lengths share one factor."""
    return -(-tokens // shape.context)


def layers_with_windows() -> UnsupportedModel:
    """Return the error for a model some of whose layers attend to a window."""
    return UnsupportedModel(
        "the context cannot be stretched: some layers of this model attend to a window",
        "shorten the prompt, or use a model with a longer context",
    )


def stretched(shape: ModelShape, factor: int) -> ModelShape:
    """Return the shape with a context `factor` times as long, by YaRN; the weights stay the same.

    Raises UnsupportedModel as `stretch_error` says.
    """
    if (error := stretch_error(shape)) is not None:
        raise error
    rope = {
        **shape.rope,
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": shape.context,
    }
    return replace(shape, rope=rope, context=shape.context * factor)


def stretch_error(shape: ModelShape) -> UnsupportedModel | None:
    """Return why a model's context cannot be stretched; None if it can.

    It cannot where the model already scales its positions, or uses a sliding window.
    """
    if shape.rope_type != "default" or shape.rope_divisors is not None:
        return UnsupportedModel(
            f"the context cannot be stretched: this model's positions are scaled already (RoPE {shape.rope_type})",
            "use a model with a longer context",
        )
    if shape.sliding_layers:
        return layers_with_windows()
    if shape.sliding_window is not None:
        return UnsupportedModel(
            f"the context cannot be stretched: this model attends to a window of {shape.sliding_window:,} tokens",
            "use a model without one",
        )
    return None
