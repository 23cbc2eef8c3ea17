"""Chooses the layout that a config's `quantization_config` names, and reads its linears. Imports no torch."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....errors import CheckpointError, UnsupportedModel
from ....short_repr import short_text
from ..checkpoint import Weight
from .layouts import Found, Stored, awq, compressed_tensors, float8, gptq

_HINT = (
    "what runs: fp8 (e4m3), gptq and awq in 4 bits, gptq in 8, compressed-tensors in int4, int8 and fp8; "
    "or use the unquantised model, or a GGUF file of it"
)
Layout = Callable[[Stored], Found]  # yields the quantised matrices among a checkpoint's tensors
_FORMATS = (None, "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """Return the layout of the quantised linears of a config.json; None if it names none. Raises UnsupportedModel.

    MXFP4 is none: only experts are, which stacked_experts.py reads.
    """
    settings = _settings(config)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method == "mxfp4":
        return None
    if method not in _CHOICES:
        raise _refusal(str(method))
    return _CHOICES[method](settings)


def quantization_text(config: Mapping[str, Any]) -> str:
    """Return the settings of a config.json that decide how its quantised weights are read."""
    return json.dumps(_settings(config), sort_keys=True)


def _settings(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _refusal(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"this checkpoint is quantised ({short_text(what)}), in a way that is not supported", _HINT)


def _gptq(settings: Mapping[str, Any]) -> Layout:
    """Choose the version of GPTQ. Layouts for one kernel, such as marlin, have their own names."""
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise _refusal(f"gptq, packed as {version}")
    group = settings.get("group_size")
    group = group if isinstance(group, int) and group > 0 else None  # -1: one group of all inputs
    return partial(gptq, symmetric=settings.get("sym", True) is True, less_one=version == "gptq", group=group)


def _awq(settings: Mapping[str, Any]) -> Layout:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refusal(f"awq, packed as {version}")
    return awq


def _float8(settings: Mapping[str, Any]) -> Layout:
    return partial(float8, block=_block(settings.get("weight_block_size")))


def _compressed_tensors(settings: Mapping[str, Any]) -> Layout:
    groups = list((settings.get("config_groups") or {}).values())
    sparsity = settings.get("sparsity_config") or {}
    formats = [each.get("format") for each in (settings, *groups, sparsity)]
    if wrong := [each for each in formats if each not in _FORMATS]:
        raise _refusal(f"compressed-tensors, {wrong[0]}")
    if settings.get("quantization_status", "compressed") != "compressed" or settings.get("transform_config"):
        raise _refusal("compressed-tensors that are not compressed, or transformed")
    blocks = [(each.get("weights") or {}).get("block_structure") for each in groups]
    return partial(compressed_tensors, block=_block(next((block for block in blocks if block is not None), None)))


def _block(block: Any) -> tuple[int, int]:
    """Return the rows and inputs of the blocks that share a scale. Raises UnsupportedModel."""
    if block is None:
        return 128, 128
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise _refusal(f"fp8 in blocks of {block}")
    return block[0], block[1]


_CHOICES = {"gptq": _gptq, "awq": _awq, "fp8": _float8, "compressed-tensors": _compressed_tensors}


def quantized_weights(layout: Layout, stored: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the weights with the quantised ones under transformers' names of the plain ones.

    Raises CheckpointError, UnsupportedModel.
    """
    try:
        matrices = dict(layout(stored))
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        what = f"quantised weights are damaged, or not as their config says: {short_text(str(error))}"
        raise CheckpointError(what, "fetch the model again") from error
    plain = {
        name: weight
        for name, weight in stored.items()
        if name.endswith(".bias") or name.rpartition(".")[0] not in matrices
    }
    return plain | {f"{stem}.weight": matrix for stem, matrix in matrices.items()}
