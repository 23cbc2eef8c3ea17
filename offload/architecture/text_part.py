"""The text part of models that also read images: its config, and its tensors' names. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# `model_type`s whose text part is a model of a family, computed as if it were alone; the family that it usually is.
WRAPPERS = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_PREFIXES = {  # as transformers has saved such models before and after version 5
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}

_TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_TEXT += ("model.embed_tokens_per_layer.", "model.per_layer_")


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model whose text part runs."""
    name = config.get("model_type")
    return isinstance(name, str) and name in WRAPPERS and isinstance(config.get("text_config"), Mapping)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text part; the config itself where there is no other part."""
    if not is_wrapper(config):
        return config
    outer = {name: config[name] for name in ("tie_word_embeddings", "eos_token_id") if config.get(name) is not None}
    return dict(config["text_config"]) | outer


def text_name(name: str) -> str:
    """Return a tensor's name as in a model of the text part alone; those of other parts stay as they are."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name[len(prefix) :]


def is_text(name: str) -> bool:
    """Return whether a tensor, by what `text_name` returns, is of the text part."""
    return name.startswith(_TEXT)


def is_decoder(name: str) -> bool:
    """Return whether a tensor is of the decoder, and not of layers that predict further tokens (MTP)."""
    return not name.startswith("mtp.")
