"""The tensors of a decoder layer: which ones there are, and where and in which order a family stores them.

The decoder's names are those of transformers' Llama. Imports no torch.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...architecture.config import ModelShape
from ...architecture.dims import LinearAttention
from ...architecture.layer_spec import Latent, LayerSpec
from ...errors import UnsupportedModel
from .checkpoint import Part

Sizes = dict[str, tuple[int, ...]]
_LAYER = re.compile(r"(?P<prefix>model\.layers\.\d+\.)(?P<module>.+)\.(?P<kind>weight|bias)")
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_ROTATED_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def layer_sizes(shape: ModelShape, spec: LayerSpec) -> Sizes:
    """Return the sizes of a layer's tensors, by the decoder's names."""
    hidden, width, heads = shape.hidden, shape.intermediate * spec.width_factor, shape.heads_of(spec)
    q, kv = shape.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    rows = {"q": q * (1 + spec.gates_heads), "k": kv, "v": kv}
    linears = {f"self_attn.{x}_proj": (rows[x], hidden, spec.qkv_bias) for x in spec.projections}
    linears["self_attn.o_proj"] = (hidden, q, spec.o_bias)
    if spec.is_linear and shape.linear is not None:
        linears = _linear_projections(shape.linear, shape.hidden)
    if spec.is_latent and shape.latent is not None:
        linears = _latent_projections(shape.latent, shape, spec)
    if shape.layer_input:
        linears["per_layer_input_gate"] = (shape.layer_input, hidden, False)
        linears["per_layer_projection"] = (hidden, shape.layer_input, False)
    mlps = ["mlp"]
    if spec.is_sparse and shape.experts is not None:
        width = shape.experts.width
        mlps = [f"mlp.experts.{i}" for i in range(shape.experts.count)]
        linears["mlp.gate"] = (shape.experts.count, hidden, spec.router_bias)
    for mlp in mlps:
        if spec.is_gated:
            linears[f"{mlp}.gate_proj"] = (width, hidden, spec.mlp_bias)
        linears[f"{mlp}.up_proj"] = (width, hidden, spec.mlp_bias)
        linears[f"{mlp}.down_proj"] = (hidden, width, spec.mlp_bias)
    if spec.shares_expert and shape.experts is not None:
        if spec.gates_shared_expert:
            linears["mlp.shared_expert_gate"] = (1, hidden, False)
        for name in ("gate_proj", "up_proj"):
            linears[f"mlp.shared_expert.{name}"] = (shape.experts.shared, hidden, False)
        linears["mlp.shared_expert.down_proj"] = (hidden, shape.experts.shared, False)
    sizes: Sizes = {f"{name}.weight": (out, into) for name, (out, into, _) in linears.items()}
    sizes |= {f"{name}.bias": (out,) for name, (out, _, bias) in linears.items() if bias}
    kinds = ("weight", "bias") if spec.norm_bias else ("weight",)
    sizes |= {f"{name}.{kind}": (hidden,) for name in _norms(spec) for kind in kinds}
    if spec.router == "sigmoid" and shape.experts is not None:
        sizes["mlp.gate.e_score_correction_bias"] = (shape.experts.count,)
    if spec.has_sinks:
        sizes["self_attn.sinks"] = (shape.heads,)
    if spec.is_linear and shape.linear is not None:
        sizes |= _linear_vectors(shape.linear)
    if shape.layer_input:
        sizes["post_per_layer_input_norm.weight"] = (hidden,)
    if spec.has_scale:
        sizes["layer_scalar"] = (1,)
    if spec.is_latent and shape.latent is not None:
        ranks = {"q_a": shape.latent.query_rank, "kv_a": shape.latent.rank}
        sizes |= {f"self_attn.{name}_layernorm.weight": (rank,) for name, rank in ranks.items() if rank}
    if spec.qk_norm:
        each = {"q": heads.head_dim, "k": heads.head_dim} if spec.qk_norm == "head" else {"q": q, "k": kv}
        sizes |= {f"self_attn.{x}_norm.weight": (each[x],) for x in spec.projections if x != "v"}
    return sizes


def _linear_projections(linear: LinearAttention, hidden: int) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and biases of the linears of a layer's linear attention."""
    rows = {"qkv": linear.width, "z": linear.values, "b": linear.value_heads, "a": linear.value_heads}
    found = {f"linear_attn.in_proj_{name}": (count, hidden, False) for name, count in rows.items()}
    return found | {"linear_attn.out_proj": (hidden, linear.values, False)}


def _latent_projections(latent: Latent, shape: ModelShape, spec: LayerSpec) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and biases of the linears of a layer's latent attention."""
    heads, hidden, rank, bias = shape.heads, shape.hidden, latent.query_rank, spec.qkv_bias
    queries = heads * (latent.plain + latent.rotated)
    q = {"q_a_proj": (rank, hidden, bias), "q_b_proj": (queries, rank, False)} if rank else {}
    others = {
        **(q or {"q_proj": (queries, hidden, False)}),
        "kv_a_proj_with_mqa": (latent.head_dim, hidden, bias),
        "kv_b_proj": (heads * (latent.plain + latent.value_dim), latent.rank, False),
        "o_proj": (hidden, heads * latent.value_dim, spec.o_bias),
    }
    return {f"self_attn.{name}": sizes for name, sizes in others.items()}


def _linear_vectors(linear: LinearAttention) -> Sizes:
    """Return the sizes of the other tensors of a layer's linear attention."""
    return {
        "linear_attn.conv1d.weight": (linear.width, 1, linear.kernel),
        "linear_attn.A_log": (linear.value_heads,),
        "linear_attn.dt_bias": (linear.value_heads,),
        "linear_attn.norm.weight": (linear.value_dim,),
    }


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
        spec = next(spec for spec in self.shape.specs if not spec.is_linear)
        return {name: size[0] for name, size in layer_sizes(self.shape, spec).items()}

    def find(self, name: str, part: Part | None = None) -> TensorPlace:
        match = _LAYER.fullmatch(name)
        if match is None:
            return TensorPlace(name, part)
        prefix, module, kind = match["prefix"], match["module"], match["kind"]
        own = self.shape.family_spec.checkpoint_name(module)
        linear = self.shape.linear
        if linear and self.shape.family_spec.groups_linear_rows and module.startswith("linear_attn.in_proj"):
            return TensorPlace(f"{prefix}{own}.{kind}", None, _grouped_rows(linear, module))
        if self.shape.latent is not None and module.startswith("self_attn.") and self.shape.rotates_neighbours:
            return TensorPlace(f"{prefix}{own}.{kind}", part, _latent_rows(self.shape.latent, module, self.shape.heads))
        fused = self.shape.family_spec.fused.get(own)
        is_rotated = module in _ROTATED or module in _ROTATED_NORMS
        rows = self._rows[f"{module}.{kind}"] if fused or is_rotated else 0
        start, end, _ = slice(None).indices(rows) if part is None else part[0].indices(rows)
        if fused:
            first = sum(self._rows[f"{other}.{kind}"] for other in fused[: fused.index(module)])
            part = (slice(first + start, first + end),)
        order = self._order(module, end - start) if is_rotated else None
        return TensorPlace(f"{prefix}{own}.{kind}", part, order)

    def _order(self, module: str, rows: int) -> list[int] | None:
        """Return the rows of q or k, of whole heads, or of their norms, in the decoder's order; None for as stored.

        Raises UnsupportedModel where norms of all heads together would need that order, too.
        """
        shape = self.shape
        spec = next(spec for spec in shape.specs if not spec.is_linear)
        gates = module == "self_attn.q_proj" and spec.gates_heads
        if not gates and not shape.rotates_neighbours and shape.rotary_dim == shape.head_dim:
            return None
        if any(spec.qk_norm == "projection" for spec in shape.specs):
            raise UnsupportedModel(
                "norms of q and k over all heads, with RoPE on neighbours or a part of each head, are not supported",
                "use a model with one of the two",
            )
        order = row_order(shape.head_dim, shape.rotary_dim, shape.rotates_neighbours)
        heads = range(0, rows, shape.head_dim * (1 + gates))
        found = [head + row for head in heads for row in order]
        behind = [head + shape.head_dim + row for head in heads for row in range(shape.head_dim)] if gates else []
        return found + behind


def _grouped_rows(linear: LinearAttention, module: str) -> list[int]:
    """Return where the rows of a projection are in a tensor that has them by key head.

    Of each key head it has q, k, and v and z of its value heads; or the rates of its value heads, and their decays.
    """
    shared = linear.value_heads // linear.key_heads
    sizes = {"q": linear.key_dim, "k": linear.key_dim, "v": shared * linear.value_dim, "z": shared * linear.value_dim}
    name = module.rpartition("_")[2]
    if name in "ba":
        sizes = {"b": shared, "a": shared}
    starts = dict(zip(sizes, accumulate((0, *sizes.values())), strict=False))
    heads = range(0, linear.key_heads * sum(sizes.values()), sum(sizes.values()))
    return [head + starts[part] + row for part in name for head in heads for row in range(sizes[part])]


def _latent_rows(latent: Latent, module: str, heads: int) -> list[int] | None:
    """Return the rows of a projection with a rotated part, whose neighbours are rotated, as two halves of it."""
    counts = {"kv_a_proj_with_mqa": (1, latent.rank)} | dict.fromkeys(("q_proj", "q_b_proj"), (heads, latent.plain))
    if (name := module.rpartition(".")[2]) not in counts:
        return None
    count, plain = counts[name]
    size = plain + latent.rotated
    each = [*range(plain), *range(plain, size, 2), *range(plain + 1, size, 2)]
    return [head * size + row for head in range(count) for row in each]


def row_order(head_dim: int, rotary_dim: int, neighbours: bool) -> list[int]:
    """Return which dimension of a checkpoint's head comes at each place of the decoder's.

    Scores do not change if the dimensions of q and of k change places together. So one decoder rotates all heads as
    Llama's: dimension i with i + head_dim / 2. Families that rotate neighbours, or only some dimensions, have the rows
    of their q and k weights reordered on loading; a pair that is not rotated has an angle of 0.

    Args:
        rotary_dim: how many dimensions are rotated, the first ones; even.
        neighbours: whether the checkpoint rotates 2i with 2i + 1, and not i with i + rotary_dim / 2.
    """
    rotated, rest = list(range(rotary_dim)), list(range(rotary_dim, head_dim))
    half, middle = rotary_dim // 2, len(rest) // 2
    low, high = (rotated[::2], rotated[1::2]) if neighbours else (rotated[:half], rotated[half:])
    return low + rest[:middle] + high + rest[middle:]
