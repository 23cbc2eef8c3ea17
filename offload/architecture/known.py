"""Dimensions of models without their weights: of a well-known one by its name, of others from their config.json.

A plan needs no more. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ModelNotFound, UnsupportedModel
from ..short_repr import short_text
from .config_checks import ConfigCheck, check_of_config
from .dims import Dimensions
from .families import FAMILIES
from .hf_config import checked_features, common_config, default_of, own_names
from .known_models import KNOWN, VERSIONS, PlanShape, draft_for
from .text_part import is_wrapper, text_config

# What publishers write behind a name without changing the dimensions.
_SUFFIX = re.compile(r"(instruct|chat|base|hf|it|v\d+|\d{4}|gguf|[qf]\d\w*|bf16|12b)+$")


def known_name(name: str) -> str | None:
    """Return the well-known model that has the dimensions of `name`; None if none has.

    Publisher and variant do not matter: "meta-llama/Llama-3.1-8B-Instruct" has those of "Llama-3.1-8B".
    """
    wanted = simplified(name)
    names = {simplified(known): known for known in KNOWN}
    candidates = (wanted, re.sub("instruct|thinking", "", wanted), _SUFFIX.sub("", wanted))
    found = next((names[candidate] for candidate in candidates if candidate in names), None)
    version = re.search(r"v\d+", wanted)
    return None if version and VERSIONS.get(found, version[0]) != version[0] else found


def sibling_of(name: str, shape: Dimensions) -> str | None:
    """Return a well-known model that drafts for a model of some name and dimensions; None if none is known."""
    known = known_name(name) or next((known for known, other in KNOWN.items() if _size(other) == _size(shape)), None)
    return None if known is None else draft_for(known)


def _size(shape: Dimensions) -> tuple[int, ...]:
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return shape.layers, shape.hidden, *heads, shape.intermediate, shape.vocab


def simplified(name: str) -> str:
    """Return a model's name in lower case, without publisher, punctuation and file name ending."""
    bare = re.sub(r"^.*/|\.gguf$", "", name.lower())
    bare = re.sub(r"[^a-z0-9]", "", bare)
    return re.sub(r"^(nousresearch|yarn|meta|deepseek)+", "", bare)


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
    is_part, config = is_wrapper(config), text_config(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(
            f"the architecture {short_text(str(family))} is not supported", f"what runs: {', '.join(FAMILIES)}"
        )
    defaults = FAMILIES[family].defaults if is_part else {}  # the config of a part has what is not usual alone
    return _shape({**defaults, **common_config(config)}, file, check_of_config(file).naming(own_names(config)))


def _shape(config: Mapping[str, Any], file: Path, check: ConfigCheck) -> PlanShape:
    family = FAMILIES[config["model_type"]]
    check.check(config)

    def number(name: str, default: Any = None) -> int:
        value = config.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{name} is None in {file}", "correct config.json")
        return default if value is None else value

    tied = config.get("tie_word_embeddings", default_of(config["model_type"], "tie_word_embeddings"))
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    number("max_position_embeddings")
    return PlanShape(
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        intermediate=number("intermediate_size", config.get("moe_intermediate_size")),  # where all layers have experts
        vocab=number("vocab_size"),
        tied_embeddings=bool(tied),
        mlp_matrices=family.mlp_matrices,
        **checked_features(config, check),
    )
