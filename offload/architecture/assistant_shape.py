"""The assistants of Gemma 4, whose layers have queries alone. Reads what their configs say. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SettingsError
from .config import ModelShape
from .config_checks import ConfigCheck
from .head_shape import OTHERS, HeadDimensions, HeadShape, check_target, number, other_target
from .hf_config import shape_from_config

ASSISTANT = "assistant"
_TARGET = "gemma4_text"


@dataclass(frozen=True)
class AssistantShape(HeadShape):
    """What an assistant computes.

    Its logits are of the tokens of the `best` of its `centroids` alone; of all tokens without any.
    """

    centroids: int = 0
    best: int = 0

    @property
    def dimensions(self) -> HeadDimensions:
        projections = 3 * self.layers.hidden * self.target_hidden
        return replace(super().dimensions, more=projections, row=self.target_hidden)


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an assistant."""
    return config.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")


def assistant_shape(config: Mapping[str, Any], target: ModelShape, check: ConfigCheck) -> AssistantShape:
    """Return the shape of an assistant.

    Raises SettingsError if it was trained for another target, CheckpointError, UnsupportedModel.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise check.error("text_config", text, "the configuration of the layers")
    if target.family != _TARGET:
        raise SettingsError(f"the drafter is an assistant of Gemma 4, and the target is a {target.family}", OTHERS)
    own = {name: value for name, value in text.items() if name != "vocab_size_per_layer_input"}
    own |= {"model_type": _TARGET, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    layers = shape_from_config({"tie_word_embeddings": True} | own, None, check)
    check_target("vocabulary", layers.vocab, target.vocab)
    width = number(config, "backbone_hidden_size", 1536, check)
    check_target("hidden size", width, target.hidden)
    _check_attention(layers, target)
    every = tuple(replace(layers.spec(i), borrows=True, keys_are_values=False) for i in range(layers.layers))
    sliding = sum(spec.window > 0 for spec in every)
    more: dict[str, Any] = {"borrowing": (layers.layers - sliding, sliding), "keys_are_values": False}
    layers = replace(layers, specs=every, eos_ids=(), logit_cap=0.0, **more)
    found = AssistantShape(ASSISTANT, layers, (target.layers,), width, layers.vocab)
    if not config.get("use_ordered_embeddings", False):
        return found
    centroids = number(config, "num_centroids", 2048, check)
    if layers.vocab % centroids:
        raise check.error("num_centroids", centroids, f"a divisor of the vocabulary of {layers.vocab:,}")
    return replace(
        found, centroids=centroids, best=min(number(config, "centroid_intermediate_top_k", 32, check), centroids)
    )


def _check_attention(layers: ModelShape, target: ModelShape) -> None:
    """Raise SettingsError if its queries do not fit the target's keys and values."""
    parts = [(layers.full_attention, target.full_attention), (layers.sliding_attention, target.sliding_attention)]
    for own, theirs in parts if layers.sliding_layers else parts[:1]:
        for what, mine, yours in (
            ("KV heads", own.kv_heads, theirs.kv_heads),
            ("head size", own.head_dim, theirs.head_dim),
            ("RoPE", dict(own.rope), dict(theirs.rope)),
        ):
            if mine != yours:
                raise other_target(f"{what} of {mine}, where this one has {yours}")
