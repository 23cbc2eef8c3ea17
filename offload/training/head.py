"""An EAGLE-3 head in torch, for training: a Llama's layer over the target's rows and the next token's embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..architecture.config import ModelShape

KeysValues = tuple[Tensor, Tensor]  # [blocks, kv_heads, slots, head_dim]


@dataclass(frozen=True)
class HeadShape:
    """The dimensions of a head; `taps` are the layers whose entering rows it reads, `vocab` is its own vocabulary."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    taps: tuple[int, ...]
    window: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def for_target(cls, shape: ModelShape, vocab: int, window: int) -> HeadShape:
        """Return the dimensions of a head for a target: its own, with the layers that EAGLE-3 reads."""
        taps = tuple(sorted({min(2, shape.layers - 1), shape.layers // 2, max(shape.layers - 3, 0)}))
        width = shape.experts.width if shape.experts else 0
        sizes = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, max(shape.intermediate, width)
        theta = float(shape.rope.get("rope_theta", 10000.0))
        return cls(*sizes, min(vocab, shape.vocab), taps, window, shape.norm_eps, theta)


class Head(nn.Module):
    """A head: `enter`, then `step` for each token that is drafted, then `logits` of what a step returns.

    The taps are multiplied by `tap_scale`, which is folded into `fc` on saving: Adam's and Muon's steps are of one size
    for all inputs, and taps of different layers and channels are not.
    """

    input_layernorm: Tensor
    hidden_norm: Tensor
    post_attention_layernorm: Tensor
    norm: Tensor
    lm_head: Tensor
    tap_scale: Tensor
    inverse_frequencies: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, wide = shape.hidden, 2 * shape.hidden
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.fc = _linear(len(shape.taps) * hidden, hidden)
        self.q_proj, self.k_proj, self.v_proj = _linear(wide, queries), _linear(wide, keys), _linear(wide, keys)
        self.o_proj = _linear(queries, hidden)
        self.gate_proj, self.up_proj = _linear(hidden, shape.intermediate), _linear(hidden, shape.intermediate)
        self.down_proj = _linear(shape.intermediate, hidden)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(hidden)))
        self.register_buffer("lm_head", torch.zeros(shape.vocab, hidden))
        self.register_buffer("tap_scale", torch.ones(len(shape.taps) * hidden))
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def initialise(self, generator: torch.Generator, tap_scale: Tensor, norm: Tensor, lm_head: Tensor) -> None:
        """Draw the first weights: the last tap goes through, and norm and output rows are the target's."""
        hidden = self.shape.hidden
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    scale = 0.1 if name in ("fc", "o_proj", "down_proj") else 1.0
                    weight.normal_(std=scale * weight.shape[1] ** -0.5, generator=generator)
            self.fc[:, -hidden:] += torch.eye(hidden)
            self.tap_scale.copy_(tap_scale)
            self.norm.copy_(norm)
            self.lm_head.copy_(lm_head)

    def enter(self, taps: Tensor) -> Tensor:
        """Return the rows `[blocks, slots, hidden]` of the first step, for taps `[blocks, slots, taps * hidden]`."""
        return F.linear(taps * self.tap_scale, self.fc)

    def step(self, embedded: Tensor, rows: Tensor, earlier: list[KeysValues]) -> Tensor:
        """Return the rows behind the layer, `[blocks, slots, hidden]`: those of the next step, and what `logits` takes.

        Slot i of step k has the embedding of token i + k and the row that step k - 1 has left in it. It attends to the
        slots of the first step up to i, and to itself in all steps up to this one; `earlier` has their keys and values,
        and gets those of this step.
        """
        rows = self._norm(rows, self.hidden_norm)
        both = torch.cat((self._norm(embedded, self.input_layernorm), rows), -1)
        rows = rows + F.linear(self._attended(both, earlier), self.o_proj)
        normed = self._norm(rows, self.post_attention_layernorm)
        gated = F.silu(F.linear(normed, self.gate_proj)) * F.linear(normed, self.up_proj)
        return rows + F.linear(gated, self.down_proj)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` over the head's own vocabulary."""
        return F.linear(self._norm(rows, self.norm), self.lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.shape.norm_eps)

    def _attended(self, x: Tensor, earlier: list[KeysValues]) -> Tensor:
        blocks, slots, shape, step = len(x), x.shape[1], self.shape, len(earlier)
        cos, sin = self._rotations(slots, step)
        q, k, v = (
            F.linear(x, weight).view(blocks, slots, -1, shape.head_dim).transpose(1, 2)
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin) * shape.head_dim**-0.5, _rotate(k, cos, sin).to(v.dtype)
        earlier.append((k, v))
        group = shape.heads // shape.kv_heads
        q = q.to(v.dtype).unflatten(1, (shape.kv_heads, group))  # [blocks, kv_heads, group, slots, head_dim]
        first_k, first_v = (each[:, :, None] for each in earlier[0])
        scores = (q @ first_k.transpose(-1, -2)).float() + self._mask(slots, step, x.device)
        own = [(q * k[:, :, None]).sum(-1, dtype=torch.float32)[..., None] for k, _ in earlier[1:]]
        shares = torch.cat((scores, *own), -1).softmax(-1).to(v.dtype)
        out = shares[..., :slots] @ first_v
        for at, (_, v) in enumerate(earlier[1:]):
            out = out + shares[..., slots + at, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).reshape(blocks, slots, -1)

    def _mask(self, slots: int, step: int, device: torch.device) -> Tensor:
        """Return what is added to the scores `[slots, slots]` of a step: -inf outside of the window."""
        at = torch.arange(slots, device=device)
        distance = at[:, None] - at
        outside = (distance < 0) | (distance + step >= self.shape.window)
        return torch.zeros((slots, slots), device=device).masked_fill(outside, float("-inf"))

    def _rotations(self, slots: int, step: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(step, step + slots, device=self.inverse_frequencies.device)
        angles = positions[:, None] * self.inverse_frequencies
        return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)


def _linear(inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(outputs, inputs))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return q or k `[..., slots, head_dim]`, rotated in fp32."""
    one, two = x.float().chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


def unrolled(head: Head, embedded: Tensor, taps: Tensor, depth: int) -> Iterator[Tensor]:
    """Yield logits `[blocks, slots, vocab]` of each of `depth` steps, the head's own rows fed back.

    `embedded` `[blocks, tokens, hidden]` are those of all tokens of the blocks, `taps` their taps. There are `depth`
    slots fewer than tokens: what slot i of step k, from 1 on, predicts is the token behind token i + k.
    """
    slots = embedded.shape[1] - depth
    rows, earlier = head.enter(taps[:, :slots]), list[KeysValues]()
    for step in range(1, depth + 1):
        rows = head.step(embedded[:, step : step + slots], rows, earlier)
        yield head.logits(rows)
