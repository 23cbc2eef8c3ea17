"""Trained drafters that read the target's hidden rows: EAGLE-3 heads, and MTP heads of Qwen3-Next and Qwen3.5.

Reads what their configs say, in the plain format and in that of `speculators`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SettingsError, UnsupportedModel
from ..short_repr import short_repr
from .config import ModelShape
from .config_checks import ConfigCheck
from .families.family import text_config
from .hf_config import shape_from_config

EAGLE3, MTP = "eagle3", "mtp"
_EAGLE_LAYERS = ("llama", "qwen3")  # kinds of layers that EAGLE-3 heads have
_OF_TARGETS = {"layer_types": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 0}
_MTP_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@dataclass(frozen=True)
class HeadShape:
    """What a head computes.

    Attributes:
        kind: EAGLE3 or MTP.
        layers: the shape of its layers, with the target's vocabulary.
        taps: the layers of the target whose inputs it reads; the target's number of layers for its output.
        target_hidden: the width of each of these rows.
        vocab: the tokens that it can propose.
        norm_before_residual: whether the residual of the first layer is normalised.
        norm_before_fc: whether the rows are normalised together, and `fc_norm`, whether each is by itself.
        norm_output: whether the row that the next token is drafted from is normalised.
        window: tokens that its layers attend to; None for all.
        target: the name of the model that it was trained for, "" if the config does not tell.
    """

    kind: str
    layers: ModelShape
    taps: tuple[int, ...]
    target_hidden: int
    vocab: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None
    target: str = ""


def is_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a head, and not of a model."""
    names = config.get("architectures")
    return "speculators_model_type" in config or "eagle3" in "".join(map(str, names or ())).lower()


def eagle3_shape(config: Mapping[str, Any], target: ModelShape, check: ConfigCheck) -> HeadShape:
    """Return the shape of an EAGLE-3 head.

    Raises SettingsError if it was trained for another target, CheckpointError, UnsupportedModel.
    """
    is_speculators = "speculators_model_type" in config
    kind = config.get("speculators_model_type", EAGLE3)
    if kind != EAGLE3:
        raise UnsupportedModel(f"drafters of the kind {short_repr(kind)} are not supported", "what runs: eagle3")
    own = dict(config["transformer_layer_config"] if is_speculators else config)
    eagle = config.get("eagle_config") or {}
    name = own.get("model_type") if own.get("model_type") in _EAGLE_LAYERS else "llama"
    layers = shape_from_config({"tie_word_embeddings": False} | own | _OF_TARGETS | {"model_type": name}, None, check)
    if layers.vocab != target.vocab:
        raise _other_target("vocabulary", layers.vocab, target.vocab)
    width = _number(config, "target_hidden_size", layers.hidden, check)
    if width != target.hidden:
        raise _other_target("hidden size", width, target.hidden)
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    return HeadShape(
        EAGLE3,
        replace(layers, eos_ids=()),
        _taps(ids, target.layers, check),
        width,
        _number(config, "draft_vocab_size", layers.vocab, check),
        norm_before_residual=bool(config.get("norm_before_residual", is_speculators)),
        norm_before_fc=bool(config.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        window=_window(own),
        target=_verifier(config),
    )


def mtp_shape(config: Mapping[str, Any], target: ModelShape, check: ConfigCheck) -> HeadShape:
    """Return the shape of the head that a target's own checkpoint has. Raises UnsupportedModel if it has none."""
    own = text_config(config)
    count = own.get("num_nextn_predict_layers") or own.get("mtp_num_hidden_layers") or 0
    if target.family not in _MTP_FAMILIES or not count:
        raise UnsupportedModel(
            f"--draft {MTP} needs a target with an MTP head, and this {target.family} has none",
            f"what has one: {', '.join(_MTP_FAMILIES)}, with num_nextn_predict_layers or mtp_num_hidden_layers",
        )
    more = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1}
    layers = shape_from_config(dict(own) | more, None, check)
    return HeadShape(MTP, layers, (target.layers,), target.hidden, target.vocab)


def _taps(ids: Any, layers: int, check: ConfigCheck) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads: by default those of EAGLE-3."""
    if ids is None:
        ids = [2, layers // 2, layers - 3]
    is_right = isinstance(ids, list) and ids and all(type(each) is int and 0 <= each <= layers for each in ids)
    if not is_right or len(set(ids)) < len(ids):
        raise check.error("eagle_aux_hidden_state_layer_ids", ids, f"different numbers of 0 to {layers}")
    return tuple(ids)


def _window(own: Mapping[str, Any]) -> int | None:
    """Return the window of a head's layers, if they have one."""
    has_window = "sliding_attention" in (own.get("layer_types") or ()) or own.get("use_sliding_window") is True
    window = own.get("sliding_window")
    return window if has_window and type(window) is int and window > 0 else None


def _verifier(config: Mapping[str, Any]) -> str:
    """Return the name of the model that a head in the format of `speculators` was trained for."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    return name if isinstance(name, str) else ""


def _number(config: Mapping[str, Any], name: str, default: int, check: ConfigCheck) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value <= 0:
        raise check.error(name, value, "a positive number")
    return value


def _other_target(what: str, theirs: int, ours: int) -> SettingsError:
    return SettingsError(
        f"the drafter was trained for another target: one with a {what} of {theirs:,}, and this one's is {ours:,}",
        "use a drafter of this target, or --draft lookup",
    )
