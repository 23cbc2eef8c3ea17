"""What is said of a model whose weights were rounded."""

from __future__ import annotations

from .format import percent


def quantized_warning(level: str, agreement: float) -> str:
    """Return that the model is another one now, and how often both chose the same token on the prompt."""
    return (
        f"--quantize {level} changes the model: on the end of the prompt it chooses the token of the original weights "
        f"{percent(agreement)} of the time"
    )
