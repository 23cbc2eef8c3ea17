"""The tensors of a decoder layer: which ones there are, and where and in which order a family stores them.

The decoder's names are those of transformers' Llama. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ..architecture.config import ModelShape
from ..architecture.layer_spec import LayerSpec
from ..architecture.rope_order import row_order
from ..errors import UnsupportedModel

Sizes = dict[str, tuple[int, ...]]
Part = tuple[slice, ...]  # of a tensor: some rows, or all rows and some columns
_LAYER = re.compile(r"(?P<prefix>model\.layers\.\d+\.)(?P<module>.+)\.(?P<kind>weight|bias)")
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def layer_sizes(shape: ModelShape, spec: LayerSpec) -> Sizes:
    """Return the sizes of a layer's tensors, by the decoder's names."""
    hidden, width, heads = shape.hidden, shape.intermediate * spec.width_factor, shape.heads_of(spec)
    q, kv = shape.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    rows = {"q": q, "k": kv, "v": kv}
    linears = {f"self_attn.{x}_proj": (rows[x], hidden, spec.qkv_bias) for x in spec.projections}
    linears["self_attn.o_proj"] = (hidden, q, spec.o_bias)
    if shape.layer_input:
        linears["per_layer_input_gate"] = (shape.layer_input, hidden, False)
        linears["per_layer_projection"] = (hidden, shape.layer_input, False)
    mlps = ["mlp"]
    if spec.is_sparse:
        width = shape.experts.width
        mlps = [f"mlp.experts.{i}" for i in range(shape.experts.count)]
        linears["mlp.gate"] = (shape.experts.count, hidden, spec.router_bias)
    for mlp in mlps:
        if spec.is_gated:
            linears[f"{mlp}.gate_proj"] = (width, hidden, spec.mlp_bias)
        linears[f"{mlp}.up_proj"] = (width, hidden, spec.mlp_bias)
        linears[f"{mlp}.down_proj"] = (hidden, width, spec.mlp_bias)
    sizes: Sizes = {f"{name}.weight": (out, into) for name, (out, into, _) in linears.items()}
    sizes |= {f"{name}.bias": (out,) for name, (out, _, bias) in linears.items() if bias}
    kinds = ("weight", "bias") if spec.norm_bias else ("weight",)
    sizes |= {f"{name}.{kind}": (hidden,) for name in _norms(spec) for kind in kinds}
    if spec.has_sinks:
        sizes["self_attn.sinks"] = (shape.heads,)
    if shape.layer_input:
        sizes["post_per_layer_input_norm.weight"] = (hidden,)
    if spec.has_scale:
        sizes["layer_scalar"] = (1,)
    if spec.qk_norm:
        each = {"q": heads.head_dim, "k": heads.head_dim} if spec.qk_norm == "head" else rows
        sizes |= {f"self_attn.{x}_norm.weight": (each[x],) for x in spec.projections if x != "v"}
    return sizes


def _norms(spec: LayerSpec) -> list[str]:
    pre = ["input_layernorm"] + ["post_attention_layernorm"] * (not spec.is_parallel)
    return pre * spec.pre_norms + ["post_self_attn_layernorm", "post_mlp_layernorm"] * spec.post_norms


def checkpoint_sizes(shape: ModelShape, sizes: Sizes) -> Sizes:
    """Return the sizes of a layer's tensors as the family stores them, from those by the decoder's names."""
    found: Sizes = {}
    for name, (rows, *columns) in sizes.items():
        module, _, kind = name.rpartition(".")
        own = f"{shape.family_spec.checkpoint_name(module)}.{kind}" if module else kind
        found[own] = (rows + found.get(own, (0,))[0], *columns)
    return found


@dataclass(frozen=True)
class TensorPlace:
    """Where a checkpoint has a tensor.

    `part` is the part of that tensor, None for all of it, and `order` the order of its rows, None for as they are.
    """

    name: str
    part: Part | None = None
    order: list[int] | None = None


@dataclass(frozen=True)
class TensorPlaces:
    """Finds the decoder's tensors in a checkpoint of a whole model's `shape`."""

    shape: ModelShape

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: size[0] for name, size in layer_sizes(self.shape, self.shape.specs[0]).items()}

    def find(self, name: str, part: Part | None = None) -> TensorPlace:
        """Return where a tensor, or `part` of it, is."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return TensorPlace(name, part)
        prefix, module, kind = match["prefix"], match["module"], match["kind"]
        own = self.shape.family_spec.checkpoint_name(module)
        fused = self.shape.family_spec.fused.get(own)
        rows = self._rows[f"{module}.{kind}"] if fused or module in _ROTATED else 0
        start, end, _ = slice(None).indices(rows) if part is None else part[0].indices(rows)
        if fused:
            first = sum(self._rows[f"{other}.{kind}"] for other in fused[: fused.index(module)])
            part = (slice(first + start, first + end),)
        order = self._order(end - start) if module in _ROTATED else None
        return TensorPlace(f"{prefix}{own}.{kind}", part, order)

    def _order(self, rows: int) -> list[int] | None:
        """Return the rows of q or k, of whole heads, in the decoder's order; None for as they are.

        Raises UnsupportedModel where their norms would need that order, too.
        """
        shape = self.shape
        if not shape.rotates_neighbours and shape.rotary_dim == shape.head_dim:
            return None
        if any(spec.qk_norm for spec in shape.specs):
            raise UnsupportedModel(
                "norms of q and k with RoPE on neighbours or a part of each head are not supported",
                "use a model with one of the two",
            )
        order = row_order(shape.head_dim, shape.rotary_dim, shape.rotates_neighbours)
        return [head + row for head in range(0, rows, shape.head_dim) for row in order]
