"""Rotary position embeddings, their frequencies taken from transformers' own RoPE functions.

Frequencies are fixed for a sequence when its KV cache is made, from the length that it may reach. With `dynamic` and
`longrope`, whose frequencies depend on the length, every key and query of a sequence then agrees, however it is
chunked, drafted or rolled back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shape import ModelShape


def _frequencies(shape: ModelShape, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` in fp32 and the factor on cos and sin, for a sequence of `length` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = shape.hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":  # transformers keeps this one inside each model's class; it is RoFormer's formula
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        inverse, factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](shape.hf_config, torch.device("cpu"), seq_len=length)
    if shape.rope_divisors is not None:
        inverse = inverse / torch.tensor(shape.rope_divisors)
    return inverse.float(), float(factor)


class Rope:
    """Rows of cos and sin for positions 0 to `length`, computed once.

    The angles are computed in fp32 and the rows kept in the model's dtype, as transformers does.
    """

    def __init__(self, shape: ModelShape, length: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse, factor = _frequencies(shape, length)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)  # [length, head_dim / 2]
        both = torch.cat((angles, angles), dim=-1)
        self._cos = (both.cos() * factor).to(device, dtype)
        self._sin = (both.sin() * factor).to(device, dtype)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each `[tokens, 1, head_dim]`, for `rotate`."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `x` `[tokens, heads, head_dim]` to the positions of `rows`; halves are paired, as in Llama's checkpoints."""
    cos, sin = rows
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
