"""Dimensions of models without their weights: well-known ones by name, others from their config.json.

A plan needs no more. Imports no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ModelNotFound, UnsupportedModel
from ..short_repr import short_text
from .config import FAMILIES, default_of, dual_chunk_tokens, positions_of
from .config_checks import ConfigCheck, check_of_config, window_in_use
from .dims import Dimensions


@dataclass(frozen=True, slots=True)
class PlanShape(Dimensions):
    """Dimensions of a decoder. `context` is the longest sequence that it was trained for, in tokens."""

    context: int
    dual_chunk: bool = False  # whether a longer context needs dual chunk attention, which is not supported


def _known(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **rest: Any
) -> PlanShape:
    """Return a shape, with defaults that most of the known models share."""
    rest = {"head_dim": 128, "tied_embeddings": False, "context": 131072} | rest
    return PlanShape(layers, hidden, heads, kv_heads, intermediate=intermediate, vocab=vocab, **rest)


# From each model's published config.json.
KNOWN = {
    "Llama-2-7B-128K": _known(32, 4096, 32, 32, 11008, 32000),
    "Llama-2-13B-128K": _known(40, 5120, 40, 40, 13824, 32000),
    "LWM-Text-Chat-128K": _known(32, 4096, 32, 32, 11008, 32000),
    "Llama-3.1-8B": _known(32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _known(80, 8192, 64, 8, 28672, 128256),
    "Llama-3.2-1B": _known(16, 2048, 32, 8, 8192, 128256, head_dim=64, tied_embeddings=True),
    "Llama-3.2-3B": _known(28, 3072, 24, 8, 8192, 128256, tied_embeddings=True),
    # Up to 1,010,000 tokens with dual chunk attention.
    "Qwen2.5-7B-1M": _known(28, 3584, 28, 4, 18944, 152064, context=262144, dual_chunk=True),
    "Qwen2.5-14B-1M": _known(48, 5120, 40, 8, 13824, 152064, context=262144, dual_chunk=True),
    "Qwen3-0.6B": _known(28, 1024, 16, 8, 3072, 151936, tied_embeddings=True, context=40960),
    "Qwen3-4B-2507": _known(36, 2560, 32, 8, 9728, 151936, tied_embeddings=True, context=262144),
    "Qwen3-8B": _known(36, 4096, 32, 8, 12288, 151936, context=40960),  # four times that with YaRN, as its card says
    "Mistral-Nemo": _known(40, 5120, 32, 8, 14336, 131072),  # heads are narrower than hidden / heads
    "SmolLM2-135M": _known(30, 576, 9, 3, 1536, 49152, head_dim=64, tied_embeddings=True, context=8192),
    "Llama-68M": _known(2, 768, 12, 12, 3072, 32000, head_dim=64, context=2048),  # JackFram's draft model
}
# What publishers write behind a name without changing the dimensions.
_SUFFIX = re.compile(r"(instruct|chat|base|hf|it|v\d+|\d{4}|gguf|[qf]\d\w*|bf16|12b)+$")


def known_name(name: str) -> str | None:
    """Return the well-known model that has the dimensions of `name`; None if none has.

    Publisher and variant do not matter: "meta-llama/Llama-3.1-8B-Instruct" has those of "Llama-3.1-8B".
    """
    wanted = simplified(name)
    names = {simplified(known): known for known in KNOWN}
    candidates = (wanted, _SUFFIX.sub("", wanted), wanted.replace("instruct", ""))
    return next((names[candidate] for candidate in candidates if candidate in names), None)


def simplified(name: str) -> str:
    """Return a model's name in lower case, without publisher, punctuation and file name ending."""
    bare = re.sub(r"^.*/|\.gguf$", "", name.lower())
    bare = re.sub(r"[^a-z0-9]", "", bare)
    return re.sub(r"^(nousresearch|yarn|meta)+", "", bare)


def read_shape(file: Path) -> PlanShape:
    """Return the dimensions in a config.json. Raises ModelNotFound, CheckpointError, UnsupportedModel."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = "--model takes a folder with config.json and safetensors"
        raise ModelNotFound(f"there is no config.json in {file.parent}", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read {file}: {short_text(str(error))}", "copy the model's files again"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not keys and values", "copy the model's files again")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"the architecture {short_text(str(family))} is not supported", f"what runs: {', '.join(FAMILIES)}"
        )
    return _shape(config, file)


def _shape(config: dict[str, Any], file: Path) -> PlanShape:
    check = check_of_config(file)
    check.check(config)

    def number(name: str, default: Any = None) -> int:
        value = config.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{name} is None in {file}", "correct config.json")
        return default if value is None else value

    def usual(name: str, otherwise: int) -> int:
        own = default_of(config["model_type"], name) if name not in config else None  # null is not absence
        return own or otherwise

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return PlanShape(
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", usual("num_key_value_heads", heads)),
        head_dim=number("head_dim", usual("head_dim", hidden // heads)),
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        context=_context(config, check, number("max_position_embeddings")),
        dual_chunk=dual_chunk_tokens(config, check) is not None,
    )


def _context(config: dict[str, Any], check: ConfigCheck, positions: int) -> int:
    context = positions_of(check.rope_of(config), positions)
    context = min(context, dual_chunk_tokens(config, check) or context)
    window = window_in_use(config["model_type"], config.get("sliding_window"), config.get("use_sliding_window"))
    return min(context, window or context)
