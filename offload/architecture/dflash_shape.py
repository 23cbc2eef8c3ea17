"""DFlash and DSpark drafters, which draft a block of tokens in one pass. Reads their configs. Imports no torch.

DSpark's logits have a bias by the token before, of low rank, and its block predicts one place further.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UnsupportedModel
from ..short_repr import short_repr
from .config_checks import ConfigCheck
from .dims import Dimensions
from .head_shape import DFLASH, OF_TARGETS, HeadDimensions, HeadShape, check_target, layer_ids, number, token_of
from .hf_config import shape_from_config
from .layer_spec import SLIDING

_LATER = ("conv_kernel_size", "selector_rank")  # values of DFlash2


@dataclass(frozen=True)
class DFlashShape(HeadShape):
    """What a DFlash or DSpark drafter computes.

    Attributes:
        mask_token: stands for the tokens to draft.
        block: the most tokens of a pass, the last one that is known among them.
        causal: for each layer whether a token of the block sees those behind it, too: False if it does.
        markov: the rank of the bias by the token before; 0: there is none.
        input_scale, output_scale, output_cap: factors of embeddings and of logits, and where these are capped; 0: not.
    """

    mask_token: int = 0
    block: int = 16
    causal: tuple[bool, ...] = ()
    markov: int = 0
    input_scale: float = 1.0
    output_scale: float = 1.0
    output_cap: float = 0.0

    @property
    def longest(self) -> int:
        """Return the most tokens of a draft."""
        return self.block if self.markov else max(self.block - 1, 1)

    @property
    def dimensions(self) -> HeadDimensions:
        inputs = len(self.taps) * self.target_hidden
        weights, row = self.layers.hidden * inputs + 2 * self.markov * self.vocab, inputs + self.target_hidden
        return replace(super().dimensions, more=weights, row=row, shares_head=True)


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a DFlash or DSpark drafter."""
    names = "".join(map(str, config.get("architectures") or ()))
    is_named = "dflash_config" in config or "DFlash" in names or "DSpark" in names
    return is_named and "speculators_model_type" not in config


def dflash_shape(config: Mapping[str, Any], target: Dimensions, check: ConfigCheck) -> DFlashShape:
    """Return the shape of a DFlash or DSpark drafter.

    Raises SettingsError if it was trained for another target, CheckpointError, UnsupportedModel.
    """
    own = config.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise check.error("dflash_config", own, "values by their names")
    values = dict(config) | dict(own)
    if later := [name for name in _LATER if name in values]:
        raise UnsupportedModel(f"DFlash2 ({later[0]}) is not supported", "draft with a DFlash or DSpark drafter")
    if (kind := values.get("markov_head_type", "vanilla")) != "vanilla":
        raise UnsupportedModel(f"the markov_head_type {short_repr(kind)} is not supported", "what runs: vanilla")
    layers = shape_from_config(
        {"tie_word_embeddings": False} | dict(config) | OF_TARGETS | {"model_type": "qwen3"}, None, check
    )
    check_target("vocabulary", layers.vocab, target.vocab)
    check_target("hidden size", layers.hidden, target.hidden)
    check_target("number of layers", number(config, "num_target_layers", target.layers, check), target.layers)
    read = layer_ids("target_layer_ids", values.get("target_layer_ids"), target.layers - 1, check)
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == layers.layers else [""] * layers.layers
    every = next((values[name] for name in ("is_causal", "causal") if values.get(name) is not None), None)
    return DFlashShape(
        DFLASH,
        replace(layers, eos_ids=()),
        tuple(each + 1 for each in read),  # what leaves a layer enters the next
        target.hidden,
        layers.vocab,
        window=_window(values, kinds),
        mask_token=token_of("mask_token_id", values, layers.vocab, check),
        block=number(values, "block_size", 16, check),
        markov=number(values, "markov_rank", 0, check) if values.get("markov_rank") else 0,
        causal=tuple(kind == SLIDING if every is None else bool(every) for kind in kinds),
        input_scale=float(values.get("input_embedding_scale") or 1.0),
        output_scale=float(values.get("output_multiplier") or 1.0),
        output_cap=float(values.get("final_logit_softcapping") or 0.0),
    )


def _window(values: Mapping[str, Any], kinds: list[str]) -> int | None:
    """Return the smallest window of the layers; None if they have none."""
    if SLIDING not in kinds and not values.get("use_swa"):
        return None
    window = values.get("swa_window_size") or values.get("sliding_window")
    return window if type(window) is int and window > 0 else None
