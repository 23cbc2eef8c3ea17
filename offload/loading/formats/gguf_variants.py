"""Refuses GGUF files of variants that the decoder would compute as the plain model, and wrongly. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from ...architecture.families import Family
from ...errors import UnsupportedModel
from ...short_repr import short_repr, short_text

_ONLY = "what runs: models with the same heads in every layer and RoPE on whole heads"
_SAFETENSORS = "use the model's safetensors"
_LONGROPE = "rope_factors_long.weight"
_ZERO = {  # keys that are absent or zero in what runs -> what others have
    "expert_count": ("mixtures of experts of this architecture", _ONLY),
    "expert_shared_count": ("experts that all tokens share", _ONLY),
    "expert_group_count": ("groups of experts", _ONLY),
    "attention.sliding_window": ("sliding windows", "use a model of this architecture without them"),
    "rope.dimension_sections": ("RoPE on several axes, as in models that read images,", _ONLY),
    "nextn_predict_layers": ("layers that predict further tokens", _ONLY),
}


def refuse_variants(
    family: Family, read: Callable[[str], Any], values: Mapping[str, Any], tensors: Container[str]
) -> None:
    """Raise UnsupportedModel for variants that the decoder does not compute.

    `read` returns the value of a key behind the architecture's name, None for an absent one; `values` are those under
    transformers' names, and `tensors` the file's names.
    """
    if isinstance(values["num_attention_heads"], list) or isinstance(values.get("num_key_value_heads"), list):
        raise UnsupportedModel("GGUF models whose layers differ in their heads are not supported", _ONLY)
    for key, (what, hint) in _ZERO.items():
        if key not in family.gguf.keys.values() and not _is_zero(value := read(key)):
            raise UnsupportedModel(f"{what} are not supported ({key} is {short_repr(value)})", hint)
    for key in family.gguf.switches:
        if read(key) is False:
            raise UnsupportedModel(f"{family.name} with {key} false is not supported", _SAFETENSORS)
    if _LONGROPE in tensors:
        raise UnsupportedModel("GGUF models with longrope are not supported", _SAFETENSORS)


def refuse_unused(names: Iterable[str]) -> None:
    """Raise UnsupportedModel for tensors of layers that the decoder would leave out."""
    if name := next(iter(names), None):
        raise UnsupportedModel(
            f"GGUF models with the tensor {short_text(name)} are not supported", f"{_ONLY}; or {_SAFETENSORS}"
        )


def _is_zero(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else not value
