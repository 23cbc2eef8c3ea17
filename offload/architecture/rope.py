"""Computes rotary position embeddings, with frequencies from transformers' own RoPE functions.

The frequencies of a sequence are fixed before it begins, from its longest possible length. With `dynamic` and
`longrope`, whose frequencies depend on the length, all keys and queries of a sequence are therefore consistent, in
every cache and however the sequence is chunked, drafted or rolled back.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..short_repr import short_repr, short_text
from .config import ModelShape


def _frequencies(shape: ModelShape, length: int) -> tuple[Tensor, float]:
    """Return inverse frequencies `[head_dim / 2]` in fp32 and the factor on cos and sin, for `length` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = shape.hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":  # transformers has this one only in each model's class; it is RoFormer's formula
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        inverse, factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        _check_factors(parameters, shape.head_dim // 2)
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](shape.hf_config, torch.device("cpu"), seq_len=length)
    if shape.rope_divisors is not None:
        inverse = inverse / torch.tensor(shape.rope_divisors)
    return inverse.float(), float(factor)


def _check_factors(parameters: dict, wanted: int) -> None:
    """Check that longrope's lists have a factor for every frequency; a list of one would be broadcast silently."""
    for name in ("short_factor", "long_factor"):
        if name in parameters and len(parameters[name]) != wanted:
            found = len(parameters[name])
            raise CheckpointError(
                f"the RoPE parameter {name} has {found} numbers, {wanted} are wanted", "correct config.json"
            )


def check_frequencies(shape: ModelShape) -> None:
    """Raise CheckpointError if the RoPE parameters, each valid by itself, together give no usable frequencies."""
    try:
        inverse, factor = _frequencies(shape, shape.context)
        usable = bool(torch.isfinite(inverse).all() and (inverse > 0).all() and math.isfinite(factor))
        reason = f"the frequencies reach from {float(inverse.min()):g} to {float(inverse.max()):g}"
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        usable, reason = False, short_text(str(error))
    if not usable:
        raise CheckpointError(
            f"the model's RoPE parameters {short_repr(shape.hf_config.rope_parameters)} do not work: {reason}",
            "correct the model's configuration, or fetch the model again",
        )


class Rope:
    """Tables of cos and sin for sequences of up to `length` tokens.

    The tables grow when later positions are requested (drafted tokens beyond the end); the frequencies do not change.
    Angles are computed in fp32 and the tables stored in the model's dtype, as in transformers.
    """

    def __init__(self, shape: ModelShape, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse, self._factor = _frequencies(shape, length)
        self._dtype, self._device = dtype, device
        self._grow(length)

    def _grow(self, length: int) -> None:
        """Compute the tables for `length` positions."""
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inverse)  # [length, head_dim / 2]
        both = torch.cat((angles, angles), dim=-1)
        self._cos = (both.cos() * self._factor).to(self._device, self._dtype)
        self._sin = (both.sin() * self._factor).to(self._device, self._dtype)

    def identity(self) -> bytes:
        """Return the frequencies and the factor as bytes; they determine all angles."""
        return self._inverse.numpy().tobytes() + struct.pack("d", self._factor)

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions `start` to `end - 1`, each `[tokens, 1, head_dim]`, for `rotate`."""
        if end > len(self._cos):
            self._grow(2 * end)
        return self._cos[start:end].unsqueeze(1), self._sin[start:end].unsqueeze(1)


def rotate(x: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x` `[tokens, heads, head_dim]` by the positions of `rows`; pairs are halves, as in Llama."""
    cos, sin = rows
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
