"""Loads the weights of one layer, fused as the decoder has them."""

from __future__ import annotations

from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.layer_spec import LayerSpec
from ..kernels.delta_rule import DeltaRule
from ..kernels.ops import LocalLinear
from ..model.experts import ExpertWeights, SharedExpert
from ..model.layer import DeltaWeights, Layer, LayerPass
from ..weight_offloading.expert_tier import ExpertMover
from .formats.layer_tensors import layer_sizes
from .weight_reader import WeightReader


def load_layer(reader: WeightReader, shape: ModelShape, index: int, experts: ExpertWeights | None = None) -> Layer:
    """Load the fused weights of one layer; `experts`, if they are loaded already."""
    spec, prefix = shape.spec(index), f"model.layers.{index}."
    attention, linear, mlp = f"{prefix}self_attn.", f"{prefix}linear_attn.", f"{prefix}mlp"
    has = set(layer_sizes(shape, spec))

    def norm(name: str, kind: str = "weight") -> Tensor | None:
        return reader.norm(f"{prefix}{name}.{kind}") if f"{name}.{kind}" in has else None

    joined = spec.qk_norm == "projection" and reader.group.size > 1
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=None
        if spec.is_linear
        else reader.linear(spec.qkv_bias, *(f"{attention}{x}_proj" for x in spec.projections)),
        q_norm=None if joined else norm("self_attn.q_norm"),
        k_norm=None if joined else norm("self_attn.k_norm"),
        joined_norm=reader.joined_norm(*(f"{attention}{x}_norm.weight" for x in "qk")) if joined else None,
        o=reader.summed(spec.o_bias, f"{linear}out_proj" if spec.is_linear else f"{attention}o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=None if spec.is_sparse else _gate_up(reader, spec, mlp),
        down=None if spec.is_sparse else reader.summed(spec.mlp_bias, f"{mlp}.down_proj"),
        experts=experts or (_load_experts(reader, shape, spec, mlp) if spec.is_sparse else None),
        input_norm_bias=norm("input_layernorm", "bias"),
        mlp_norm_bias=norm("post_attention_layernorm", "bias"),
        attention_post_norm=norm("post_self_attn_layernorm"),
        mlp_post_norm=norm("post_mlp_layernorm"),
        sinks=reader.wide(f"{attention}sinks") if spec.has_sinks else None,
        v_norm=reader.ones(shape.heads_of(spec).head_dim) if spec.normalises_values and not spec.borrows else None,
        input_gate=reader.linear(False, f"{prefix}per_layer_input_gate") if shape.layer_input else None,
        input_projection=reader.linear(False, f"{prefix}per_layer_projection") if shape.layer_input else None,
        input_post_norm=norm("post_per_layer_input_norm"),
        scale=reader.stacked(f"{prefix}layer_scalar") if spec.has_scale else None,
        delta=_load_delta(reader, shape, linear) if spec.is_linear else None,
    )


def load_layer_apart(
    reader: WeightReader, host: WeightReader, shape: ModelShape, index: int, mover: ExpertMover
) -> Layer:
    """Load a sparse layer whose experts are in host memory: by `host`, and everything else by `reader`."""
    spec = shape.spec(index)
    experts = _load_experts(host, shape, spec, f"model.layers.{index}.mlp", reader)
    moved = mover.moved(experts, lambda do: LayerPass(spec, shape, do).activated)
    return load_layer(reader, shape, index, moved)


def _load_delta(reader: WeightReader, shape: ModelShape, prefix: str) -> DeltaWeights:
    """Load the weights of a layer's linear attention, but for those of the output."""
    conv = reader.wide(f"{prefix}conv1d.weight").squeeze(1).T.contiguous()
    decay = -reader.wide(f"{prefix}A_log").exp()
    return DeltaWeights(
        inputs=reader.linear(False, *(f"{prefix}in_proj_{x}" for x in ("qkv", "z"))),
        gates=reader.linear(False, *(f"{prefix}in_proj_{x}" for x in "ba")),
        rule=DeltaRule(shape.linear, conv, decay, reader.wide(f"{prefix}dt_bias")),
        norm=reader.wide(f"{prefix}norm.weight"),
    )


def _gate_up(reader: WeightReader, spec: LayerSpec, mlp: str) -> LocalLinear:
    return reader.linear(spec.mlp_bias, *(f"{mlp}.{x}_proj" for x in ("gate", "up")[not spec.is_gated :]))


def _load_experts(
    reader: WeightReader, shape: ModelShape, spec: LayerSpec, mlp: str, always: WeightReader | None = None
) -> ExpertWeights:
    """Load the experts of one layer, one after the other, a rank's columns of each.

    What all tokens have, the router and a shared expert, is loaded by the reader `always`, if that is another one.
    """
    always = always or reader
    each = [f"{mlp}.experts.{i}" for i in range(shape.experts.count)]
    down_bias = spec.mlp_bias and reader.group.rank == 0  # the ranks' outputs are summed
    return ExpertWeights(
        router=always.linear(spec.router_bias, f"{mlp}.gate"),
        gate_up=tuple(_gate_up(reader, spec, name) for name in each),
        down=tuple(reader.linear(down_bias, f"{name}.down_proj") for name in each),
        per_token=shape.experts.per_token,
        group=reader.group,
        shared=_load_shared_expert(always, spec, mlp) if spec.shares_expert else None,
    )


def _load_shared_expert(reader: WeightReader, spec: LayerSpec, mlp: str) -> SharedExpert:
    name = f"{mlp}.shared_expert"
    gate, down = reader.linear(False, f"{name}_gate"), reader.linear(False, f"{name}.down_proj")
    return SharedExpert(gate, _gate_up(reader, spec, name), down)
