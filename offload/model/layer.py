"""One layer of the decoder: its weights, and what it computes with them, as its `LayerSpec` says."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.layer_spec import LayerSpec
from ..kernels.attention import with_sinks
from ..kernels.delta_rule import DeltaRule
from ..kernels.ops import Linear, LocalLinear, Operations
from ..parallel.linear import JoinedNorm
from .experts import ExpertWeights
from .latent import LatentWeights
from .row_inputs import NO_INPUTS, RowInputs

Attend = Callable[..., Tensor]  # as `Attends.attend` of one layer, or `attend_linear` of one with linear attention
AttendLinear = Callable[[DeltaRule, Tensor, Tensor], Tensor]  # as `Attends.attend_linear` of one layer
_SWIGLU_ALPHA = 1.702
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x.contiguous()),  # rows apart are computed otherwise than one row: not in the same bits
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a layer with a gated delta rule, but for those of the output."""

    inputs: LocalLinear  # [width + values, hidden]: q, k and v, and the output's gate
    gates: LocalLinear  # [2 * value_heads, hidden]: of rates and decays
    rule: DeltaRule
    norm: Tensor  # [value_dim] in fp32

    def attended(self, x: Tensor, epsilon: float, attend: AttendLinear) -> Tensor:
        """Return normalised and gated outputs of all heads `[tokens, values]` for rows `[tokens, hidden]`."""
        sizes = self.rule.sizes
        rows, gate = self.inputs(x).split((sizes.width, sizes.values), dim=-1)
        out = attend(self.rule, rows, self.gates.wide(x))
        out = F.rms_norm(out, self.norm.shape, self.norm, epsilon).flatten(1)
        return (out * F.silu(gate.float())).to(x.dtype)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the linears."""
        return [*self.inputs.tensors(), *self.gates.tensors()]


def _clamped_swiglu(x: Tensor, limit: float) -> Tensor:
    """Return the gate of gpt-oss (openai/gpt-oss, `swiglu` of its torch model) of rows `[tokens, gate and up]`."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(_SWIGLU_ALPHA * gate) * (up + 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; q, k, v and gate, up are fused. A family has some of the norms.

    With gates of heads, `qkv` has their rows behind those of q.
    """

    input_norm: Tensor | None  # [hidden]
    qkv: Linear | None  # [(heads + 2 kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim], or [heads * head_dim]
    k_norm: Tensor | None  # [head_dim], or [kv_heads * head_dim]
    o: Linear  # [hidden, heads * head_dim]
    mlp_norm: Tensor | None  # [hidden]
    gate_up: Linear | None  # [2 * intermediate, hidden]; without a gate [intermediate, hidden]
    down: Linear | None  # [hidden, intermediate]
    input_norm_bias: Tensor | None = None  # [hidden], as all below
    mlp_norm_bias: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    experts: ExpertWeights | None = None  # in place of gate_up and down
    sinks: Tensor | None = None  # [heads], in fp32
    delta: DeltaWeights | None = None  # in place of qkv and the norms of q and k
    latent: LatentWeights | None = None  # likewise
    v_norm: Tensor | None = None  # [head_dim], of ones
    input_gate: Linear | None = None  # [width, hidden], of the layer's own embeddings
    input_projection: Linear | None = None  # [hidden, width]
    input_post_norm: Tensor | None = None  # [hidden]
    joined_norm: JoinedNorm | None = None  # in place of q_norm and k_norm, where ranks share the heads
    scale: Tensor | None = None  # [1], of the rows behind the layer

    def linear_bytes(self, tokens: int = 1) -> float:
        """Return the bytes of the weights that a pass of `tokens` tokens multiplies with: of experts those expected."""
        linears = filter(None, (self.qkv, self.o, self.gate_up, self.down, self.input_gate, self.input_projection))
        dense = sum(tensor.nbytes for linear in linears for tensor in linear.tensors())
        for part in (self.delta, self.latent):
            dense += 0 if part is None else sum(tensor.nbytes for tensor in part.tensors())
        return dense if self.experts is None else dense + self.experts.read_bytes(tokens)


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Runs layers of one spec. `shape` has the dimensions; a pass may overwrite its input rows `[tokens, hidden]`."""

    spec: LayerSpec
    shape: ModelShape
    do: Operations

    def run(
        self, layer: Layer, x: Tensor, attend: Attend, inputs: RowInputs = NO_INPUTS, normed: Tensor | None = None
    ) -> Tensor:
        """Return the rows `[tokens, hidden]` behind a layer. What its `qkv` takes is `normed`, if that is given."""
        if normed is None:
            normed = self.norm(x, layer.input_norm, layer.input_norm_bias)
        attended = self._attended(layer, normed, attend, inputs).reshape(len(x), -1)
        x = self._add(x, layer.o, attended, layer.attention_post_norm)
        if not self.spec.is_parallel:
            normed = self.norm(x, layer.mlp_norm, layer.mlp_norm_bias)
        if layer.experts is not None:
            mixed = layer.experts.mixed(normed, self.spec, self.activated)
            return self._add_rows(x, mixed, layer.mlp_post_norm)
        assert layer.gate_up is not None and layer.down is not None
        x = self._add(x, layer.down, self.activated(layer.gate_up(normed)), layer.mlp_post_norm)
        if inputs.embeddings is not None:
            assert layer.input_gate is not None and layer.input_projection is not None
            gated = _ACTIVATIONS[self.spec.activation](layer.input_gate(x)) * inputs.embeddings
            x = self._add(x, layer.input_projection, gated, layer.input_post_norm)
        return x if layer.scale is None else x.mul_(layer.scale)

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Return rows `[tokens, hidden]` normalised; those themselves without a weight."""
        if weight is None:
            return x
        if self.spec.norm == "layer":
            return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, self.shape.norm_eps).to(x.dtype)
        if weight.dtype != x.dtype:  # in fp32, and not rounded to the dtype of x
            return F.rms_norm(x.float(), weight.shape, weight, self.shape.norm_eps).to(x.dtype)
        return self.do.norm(x, weight, self.shape.norm_eps)

    def _attended(self, layer: Layer, x: Tensor, attend: Attend, inputs: RowInputs) -> Tensor:
        """Return the output of attention, `[tokens, heads, head_dim]`, for normalised rows."""
        if layer.delta is not None:
            return layer.delta.attended(x, self.shape.norm_eps, attend)
        if layer.latent is not None:
            return layer.latent.attended(x, self.do, attend)
        q, gate, k, v = self.project(layer, x)
        if inputs.query_scales is not None:
            q = q * inputs.query_scales
        if gate is not None:
            return attend(q, k, v) * torch.sigmoid(gate)
        if layer.sinks is None:
            return attend(q, k, v)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return with_sinks(attend(q, k, v, lse=lse), lse, layer.sinks)

    def project(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return q and its gate `[tokens, heads, head_dim]`, and k and v `[tokens, kv_heads, head_dim]`.

        A gate that the layer does not have is None, as are borrowed k and v.
        """
        own, spec = self.shape.heads_of(self.spec), self.spec
        queries, gates = self.shape.heads, self.shape.heads * spec.gates_heads
        assert layer.qkv is not None
        heads = layer.qkv(x).view(len(x), -1, own.head_dim)
        kv_heads = (own.kv_heads,) * (len(spec.projections) - 1)
        q, gate, *both = heads.split((queries, gates, *kv_heads), dim=1)
        k, v = (both[0], both[-1]) if both else (None, None)
        if layer.joined_norm is not None and k is not None:
            q, k = layer.joined_norm(q, k, self.shape.norm_eps)
        elif layer.q_norm is not None:
            q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
        q = q if spec.query_scale == 1.0 else q * spec.query_scale
        return q, gate if gates else None, k, self._norm_heads(v, layer.v_norm)

    def _norm_heads(self, x: Tensor | None, weight: Tensor | None) -> Tensor | None:
        """Return `x` `[tokens, heads, head_dim]` with RMSNorm over as many numbers as the weight has, if both are."""
        if x is None or weight is None:
            return x
        rows, epsilon = x.reshape(len(x), -1, len(weight)), self.shape.norm_eps
        if weight.dtype != x.dtype:
            return F.rms_norm(rows.float(), weight.shape, weight, epsilon).to(x.dtype).view(x.shape)
        return self.do.norm_heads(rows, weight, epsilon).view(x.shape)

    def activated(self, x: Tensor) -> Tensor:
        """Return what `down` takes, `[tokens, intermediate]`."""
        if self.spec.swiglu_limit:
            return _clamped_swiglu(x, self.spec.swiglu_limit)
        if self.spec.is_gated and self.spec.activation == "silu":
            return self.do.gated(x)
        activation = _ACTIVATIONS[self.spec.activation]
        if not self.spec.is_gated:
            return activation(x)
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    def _add(self, x: Tensor, linear: Linear, rows: Tensor, norm: Tensor | None) -> Tensor:
        """Return the residual `x` plus a linear of `rows`, which may be normalised and scaled before."""
        if norm is None and self.spec.residual_scale == 1.0:
            return linear(rows, onto=x)
        return self._add_rows(x, linear(rows), norm)

    def _add_rows(self, x: Tensor, rows: Tensor, norm: Tensor | None) -> Tensor:
        """Return the residual `x` plus `rows`, which may be in fp32, and normalised and scaled before."""
        added = rows if norm is None else self.norm(rows.to(x.dtype), norm)
        # Not `add_(alpha=...)`: in bf16 it rounds the last numbers of a thread's part otherwise than the rest, so that
        # a row's bits would depend on the rows beside it.
        return x.add_(added if self.spec.residual_scale == 1.0 else added.mul_(self.spec.residual_scale))
