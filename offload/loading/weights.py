"""Loads a checkpoint's tensors into the decoder's fused weights, on one device in one dtype."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.dims import LinearAttention
from ..architecture.layer_spec import LayerSpec
from ..kernels.delta_rule import DeltaRule
from ..kernels.ops import Linear, LocalLinear, Operations, TorchOperations
from ..model.decoder import Model
from ..model.experts import ExpertWeights, SharedExpert
from ..model.latent import LatentWeights
from ..model.layer import DeltaWeights, Layer, LayerPass
from ..model.row_inputs import LayerEmbeddings
from ..parallel import ALONE, Group, Share
from ..weight_offloading.experts import ExpertStore
from ..weight_offloading.layer_stream import StreamedLayers, WeightTier
from .formats.checkpoint import Checkpoint
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
        if spec.is_linear or spec.is_latent
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
        delta=_load_delta(reader, shape.linear, linear) if spec.is_linear and shape.linear is not None else None,
        latent=_load_latent(reader, shape, spec, attention) if spec.is_latent else None,
    )


def load_layer_apart(
    reader: WeightReader, host: WeightReader, shape: ModelShape, index: int, store: ExpertStore, operations: Operations
) -> Layer:
    """Load a sparse layer whose experts are in host memory: by `host`, for `operations`, and the rest by `reader`."""
    spec = shape.spec(index)
    experts = _load_experts(host, shape, spec, f"model.layers.{index}.mlp", reader)
    return load_layer(reader, shape, index, store.add(experts, LayerPass(spec, shape, operations).activated))


def _load_delta(reader: WeightReader, linear: LinearAttention, prefix: str) -> DeltaWeights:
    """Load the weights of a layer's linear attention, but for those of the output."""
    conv = reader.wide(f"{prefix}conv1d.weight").squeeze(1).T.contiguous()
    decay = -reader.wide(f"{prefix}A_log").exp()
    return DeltaWeights(
        inputs=reader.linear(False, *(f"{prefix}in_proj_{x}" for x in ("qkv", "z"))),
        gates=reader.linear(False, *(f"{prefix}in_proj_{x}" for x in "ba")),
        rule=DeltaRule(linear, conv, decay, reader.wide(f"{prefix}dt_bias")),
        norm=reader.wide(f"{prefix}norm.weight"),
    )


def _load_latent(reader: WeightReader, shape: ModelShape, spec: LayerSpec, prefix: str) -> LatentWeights:
    """Load the weights of a layer's latent attention, but for those of the output."""
    sizes, has_latent = shape.latent, "self_attn.q_a_proj.weight" in layer_sizes(shape, spec)
    assert sizes is not None
    both = reader.stacked(f"{prefix}kv_b_proj.weight").unflatten(0, (shape.heads, -1))
    keys, values = both.split((sizes.plain, sizes.value_dim), dim=1)
    return LatentWeights(
        sizes=sizes,
        query_scale=spec.query_scale * sizes.head_dim**0.5,
        query_latent=reader.linear(spec.qkv_bias, f"{prefix}q_a_proj") if has_latent else None,
        query_norm=reader.norm(f"{prefix}q_a_layernorm.weight") if has_latent else None,
        queries=reader.linear(False, f"{prefix}{'q_b_proj' if has_latent else 'q_proj'}"),
        latent=reader.linear(spec.qkv_bias, f"{prefix}kv_a_proj_with_mqa"),
        latent_norm=reader.norm(f"{prefix}kv_a_layernorm.weight"),
        keys=[reader.linear_of(each.T.contiguous()) for each in keys],
        values=[reader.linear_of(each.contiguous()) for each in values],
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
    assert shape.experts is not None
    each = [f"{mlp}.experts.{i}" for i in range(shape.experts.count)]
    down_bias = spec.mlp_bias and reader.group.rank == 0  # the ranks' outputs are summed
    return ExpertWeights(
        router=always.linear(spec.router_bias, f"{mlp}.gate"),
        gate_up=tuple(_gate_up(reader, spec, name) for name in each),
        down=tuple(reader.linear(down_bias, f"{name}.down_proj") for name in each),
        per_token=shape.experts.per_token,
        group=reader.group,
        shared=_load_shared_expert(always, spec, mlp) if spec.shares_expert else None,
        choice_bias=always.wide(f"{mlp}.gate.e_score_correction_bias") if spec.router == "sigmoid" else None,
    )


def _load_shared_expert(reader: WeightReader, spec: LayerSpec, mlp: str) -> SharedExpert:
    name = f"{mlp}.shared_expert"
    gate = reader.linear(False, f"{name}_gate") if spec.gates_shared_expert else None
    return SharedExpert(gate, _gate_up(reader, spec, name), reader.linear(False, f"{name}.down_proj"))


Progress = Callable[[int, int], None]  # layers done, layers in all
_CPU = torch.device("cpu")


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    operations: Operations | None = None,
    tier: WeightTier | None = None,
    group: Group = ALONE,
    share: Share | None = None,
) -> Model:
    """Read the weights of a checkpoint that `check_tensors` has passed.

    Args:
        progress: called after every layer.
        operations: defines the layout of the weights; None for torch's.
        tier: which layers' weights do not stay on the device; None for none.
        group: the ranks that share the model.
        share: the part of the model that this rank of `group` loads; None for all of it.
    """
    shape = checkpoint.shape if share is None else share.shape
    do: Operations = operations or TorchOperations()
    with checkpoint.opened() as weights:

        def reader_to(device: torch.device, operations: Operations) -> WeightReader:
            return WeightReader(weights, dtype, device, operations, group, share, checkpoint.shape)

        reader, outside = reader_to(device, do), reader_to(_CPU, do)
        embedding, head = _load_ends(reader, shape)
        checkpoint.close()
        resident = shape.layers if tier is None else min(tier.resident, shape.layers)
        experts = None if tier is None else tier.experts
        store = None if experts is None else ExpertStore(experts, device, do)
        loaded: list[Layer] = []
        for index in range(shape.layers):
            if store and experts and shape.spec(index).is_sparse and store.takes_next():
                host = reader_to(_CPU, experts.operations)
                loaded.append(load_layer_apart(reader, host, shape, index, store, experts.operations))
            else:
                loaded.append(load_layer(reader if index < resident else outside, shape, index))
            checkpoint.close()  # mapped pages count as this process's memory, and would be a second copy
            progress(index + 1, shape.layers)
        layers: Iterable[Layer] = loaded
        if tier is not None and resident < shape.layers:
            layers = StreamedLayers(loaded[:resident], loaded[resident:], tier.link, device)
        norm, bias = _final_norm(reader, shape)
        own = _layer_embeddings(reader, outside, shape)
        model = Model(shape, do, embedding, layers, norm, head, group, bias, dtype, own)
        if store is not None:
            store.allocate()
            model.experts_run = store.statistics
        return model


def _load_ends(reader: WeightReader, shape: ModelShape) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """Load the embedding and the output head; a tied table is stored once, in the head's layout."""
    if shape.tied_embeddings:
        head = reader.gathered(reader.linear(False, "model.embed_tokens"))
        return head.rows, head
    return reader.embedding("model.embed_tokens"), reader.gathered(reader.linear(False, "lm_head"))


def _final_norm(reader: WeightReader, shape: ModelShape) -> tuple[Tensor, Tensor | None]:
    """Load weight and bias of the norm behind the last layer."""
    bias = reader.norm("model.norm.bias") if shape.specs[0].norm_bias else None
    return reader.norm("model.norm.weight"), bias


def _layer_embeddings(reader: WeightReader, outside: WeightReader, shape: ModelShape) -> LayerEmbeddings | None:
    """Load what gives each layer its own embeddings, if they have them; the table by the reader to host memory."""
    if not shape.layer_input:
        return None
    return LayerEmbeddings(
        table=outside.table("model.embed_tokens_per_layer"),
        projection=reader.linear(False, "model.per_layer_model_projection"),
        norm=reader.wide("model.per_layer_projection_norm.weight"),
    )
