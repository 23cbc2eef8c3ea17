"""What is said of a model whose weights were rounded."""

from __future__ import annotations

from .format import percent


def quantized_warning(level: str, agreement: float | None) -> str:
    """Return that the model is another one now, and how often both chose the same token on the prompt, if known."""
    if agreement is None:
        return f"--quantize {level} changes the model: there is too little memory to measure by how much"
    return (
        f"--quantize {level} changes the model: on the end of the prompt it chooses the token of the original weights "
        f"{percent(agreement)} of the time"
    )
