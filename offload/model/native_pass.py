"""Run all layers for a few tokens in one call of the native kernel: a call from Python takes longer than a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..architecture.layer_spec import LayerSpec
from ..kernels.native import structs
from ..kernels.native.ops import NativeLinear
from ..kernels.native.structs import DecoderLayer, Pass, Rows
from .layer import Layer

if TYPE_CHECKING:
    from .decoder import Model

_LINEARS = ("qkv", "o", "gate_up", "down")


class NativePass:
    """Runs the layers of a model if the kernel has all of their operations."""

    def __init__(self, model: Model, layers: Sequence[Layer]) -> None:
        shape, kernel = model.shape, model.operations.kernel
        assert kernel is not None
        self._kernel, self._width = kernel, shape.heads * shape.head_dim
        self._layers = layers  # the structs refer to their tensors
        self._structs = (DecoderLayer * len(layers))(*(_struct(layer, model) for layer in layers))
        self._same = {"layers": self._structs, "heads": shape.heads, "kv_heads": shape.kv_heads}
        self._same |= {"head_dim": shape.head_dim, "scale": shape.head_dim**-0.5}

    def run(self, x: Tensor, cache: Any, taps: Sequence[int]) -> list[Tensor] | None:
        """Run rows `x` `[tokens, hidden]` through all layers, in a pass that the cache has begun.

        Returns the rows behind the last layer, in the memory of `x`, and copies of the rows that enter the layers
        `taps`. Returns None, with nothing run, for a cache that calls the kernel layer by layer.
        """
        caches = getattr(cache, "caches", (cache,))
        parts = [part.native_sequence() for part in caches if hasattr(part, "native_sequence")]
        if len(parts) < len(caches) or None in parts:
            return None
        sequences, rows, kept = (structs.Sequence * len(parts))(*parts), 0, []
        for sequence in sequences:
            sequence.first, rows = rows, rows + sequence.tokens
            if not sequence.rotated:
                kept.append(torch.empty((sequence.tokens, self._width), dtype=x.dtype))
                sequence.rotated = kept[-1].data_ptr()
        call = Pass(
            sequences=sequences,
            count=len(parts),
            x=x.data_ptr(),
            rows=rows,
            wide=x.dtype == torch.float32,
            **self._same,
        )
        tapped: list[Tensor] = []
        for border in (*taps, len(self._layers)):
            if border > call.first:
                call.last = border
                self._kernel.run(call)
                call.first = border
            if border < len(self._layers):
                tapped.append(x.clone())
        return [x, *tapped]


def native_pass(model: Model, layers: Any) -> NativePass | None:
    """Return the native pass of a model; None if its layers need torch or other ranks, or are not all in memory."""
    has_kernel = model.operations.kernel is not None and model.group.size == 1 and isinstance(layers, list)
    is_native = model.shape.is_native and model.shape.takes_rows_alone and all(map(_is_llama, model.shape.specs))
    if not (has_kernel and is_native and all(_is_native(layer, model.dtype) for layer in layers)):
        return None
    return NativePass(model, layers)


def _is_llama(spec: LayerSpec) -> bool:
    return spec.pre_norms and not (spec.is_parallel or spec.keys_are_values or spec.swiglu_limit)


def _is_native(layer: Layer, dtype: torch.dtype) -> bool:
    norms = [norm for norm in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if norm is not None]
    has_linears = all(isinstance(getattr(layer, name), NativeLinear) for name in _LINEARS)
    return has_linears and len(norms) in (2, 4) and all(norm.dtype == dtype and norm.is_cpu for norm in norms)


def _struct(layer: Layer, model: Model) -> DecoderLayer:
    shape, linears = model.shape, {name: getattr(layer, name).linears for name in _LINEARS}
    hidden, row = shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def norm(weight: Tensor | None, width: int, stride: int) -> Rows:
        """Return the norm of `width` numbers of a row, in parts of as many as the weight has."""
        if weight is None:
            return Rows()
        size, wide = weight.numel(), weight.dtype == torch.float32
        assert width % size == 0 and weight.is_contiguous()
        epsilon = shape.norm_eps
        return Rows(
            weight=weight.data_ptr(), width=size, heads=width // size, stride=stride, epsilon=epsilon, wide=wide
        )

    return DecoderLayer(
        norm(layer.input_norm, hidden, hidden),
        norm(layer.q_norm, shape.heads * shape.head_dim, row),
        norm(layer.k_norm, shape.kv_heads * shape.head_dim, row),
        norm(layer.mlp_norm, hidden, hidden),
        **linears,
    )
