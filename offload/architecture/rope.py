"""Computes rotary position embeddings, with the frequencies that transformers' RoPE functions give.

The frequencies of a sequence are fixed before it begins, from its longest possible length. With `dynamic` and
`longrope`, whose frequencies depend on the length, all keys and queries of a sequence are therefore consistent, in
every cache and however the sequence is chunked, drafted or rolled back.
"""

import math
import struct
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CheckpointError
from ..short_repr import short_repr
from .config import ModelShape

Rows = tuple[Tensor, Tensor]  # cos and sin of some positions, as `rotate` takes them


def _frequencies(shape: ModelShape, length: int) -> tuple[Tensor, float]:
    """Return inverse frequencies `[rotary_dim / 2]` in fp32 and the factor on cos and sin, for `length` tokens."""
    if shape.rope_type in _OWN:
        inverse, factor = _OWN[shape.rope_type](_unscaled(shape), shape.rope), 1.0
    else:
        inverse, factor = _from_transformers(shape, length)
    if shape.rope_divisors is not None:
        inverse = inverse / torch.tensor(shape.rope_divisors)
    return inverse.float(), float(factor)


def _unscaled(shape: ModelShape) -> Tensor:
    """Return RoFormer's inverse frequencies."""
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    return 1.0 / shape.rope["rope_theta"] ** exponents


def _llama3(inverse: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Return Llama 3's frequencies: low ones divided by a factor, high ones unchanged, those between interpolated."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    positions = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    divided = torch.where(wavelength > positions / low, inverse / factor, inverse)
    smooth = (positions / wavelength - low) / (high - low)
    between = (1 - smooth) * divided / factor + smooth * divided
    is_between = ~(wavelength < positions / high) & ~(wavelength > positions / low)
    return torch.where(is_between, between, divided)


# The common types, in transformers' order of operations: importing transformers takes seconds.
_OWN = {
    "default": lambda inverse, rope: inverse,
    "linear": lambda inverse, rope: inverse / rope["factor"],
    "llama3": _llama3,
    "proportional": lambda inverse, rope: (
        inverse[: int(rope.get("partial_rotary_factor", 1.0) * len(inverse))] / rope.get("factor", 1.0)
    ),
}


def _from_transformers(shape: ModelShape, length: int) -> tuple[Tensor, float]:
    """Return inverse frequencies and factor from transformers' function for a RoPE type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters={**shape.rope, "partial_rotary_factor": 1.0},
        max_position_embeddings=shape.max_positions,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.rotary_dim,
        standardize_rope_params=lambda: None,  # they are in the standard form
    )
    return ROPE_INIT_FUNCTIONS[shape.rope_type](config, torch.device("cpu"), seq_len=length)


def check_frequencies(shape: ModelShape) -> None:
    """Raise CheckpointError if the RoPE parameters, each valid by itself, together give no usable frequencies."""
    if shape.sliding_rope is not None:
        check_frequencies(shape.sliding_attention)
    for name in ("short_factor", "long_factor") if shape.rope_type == "longrope" else ():
        if (count := len(shape.rope[name])) != (wanted := shape.rotary_dim // 2):  # one would be broadcast silently
            message = f"the RoPE parameter {name} has {count} numbers, {wanted} are wanted"
            raise CheckpointError(message, "correct config.json")
    try:
        inverse, factor = _frequencies(shape, shape.context)
        usable = bool(torch.isfinite(inverse).all() and (inverse > 0).all() and math.isfinite(factor))
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError):
        usable = False
    if not usable:
        message = f"the model's RoPE parameters {short_repr(dict(shape.rope))} do not work together"
        raise CheckpointError(message, "correct the model's configuration, or fetch the model again")


_PIECE = 2**14  # positions


class Rope:
    """Tables of cos and sin for sequences of up to `length` tokens.

    The tables grow when later positions are requested (drafted tokens beyond the end); the frequencies do not change.
    Angles are computed in fp32 and the tables stored in the model's dtype, as in transformers.
    """

    def __init__(self, shape: ModelShape, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = length  # the longest that the sequence was expected to be
        self._inverse, self._factor = _frequencies(shape, length)
        self._dtype, self._device = dtype, device
        self._unrotated = shape.head_dim // 2 - len(self._inverse)  # pairs of dimensions, behind those that are
        self._cos, self._sin = (torch.empty((0, shape.head_dim), dtype=dtype, device=device) for _ in range(2))
        self._grow(length)

    def _grow(self, length: int) -> None:
        """Extend the tables to `length` positions, in pieces: whole, angles in fp32 take several times their memory."""
        done = len(self._cos)
        cos, sin = (table.new_empty((length, table.shape[1])) for table in (self._cos, self._sin))
        cos[:done], sin[:done] = self._cos, self._sin
        for start in range(done, length, _PIECE):
            positions = torch.arange(start, min(start + _PIECE, length), dtype=torch.float32)
            angles = torch.outer(positions, self._inverse)  # [positions, rotary_dim / 2]
            for table, of, fixed in ((cos, torch.cos, 1.0), (sin, torch.sin, 0.0)):
                half = F.pad(of(angles) * self._factor, (0, self._unrotated), value=fixed)
                half = half.to(self._device, self._dtype)
                table[start : start + len(half)] = torch.cat((half, half), dim=-1)
        self._cos, self._sin, self._known = cos, sin, length

    def identity(self) -> bytes:
        """Return the frequencies and the factor as bytes; they determine all angles."""
        return self._inverse.numpy().tobytes() + struct.pack("d", self._factor)

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions `start` to `end - 1`, each `[tokens, 1, head_dim]`, for `rotate`."""
        self._reach(end)
        return self._cos[start:end].unsqueeze(1), self._sin[start:end].unsqueeze(1)

    def _reach(self, end: int) -> None:
        if end > self._known:
            self._grow(end + min(end, _PIECE))


def rotate(x: Tensor, rows: Rows) -> Tensor:
    """Rotate `x` `[tokens, heads, head_dim]` by the positions of `rows`; pairs are halves, as in Llama."""
    cos, sin = rows
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rows_of(shape: ModelShape, layer: int, rows: Rows) -> Rows:
    """Return the rotations of a layer: `rows`, or rotations by angles of 0 for a layer without RoPE."""
    if shape.spec(layer).rotates:
        return rows
    cos, sin = rows
    return torch.ones_like(cos), torch.zeros_like(sin)
