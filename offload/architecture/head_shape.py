"""Trained drafters that read the target's hidden rows: EAGLE-3 heads, and MTP heads of Qwen3-Next and Qwen3.5.

Reads their configs, in the plain format and in the format of `speculators`. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import SettingsError, UnsupportedModel
from ..settings.config import MTP
from ..short_repr import short_repr
from .config import ModelShape
from .config_checks import ConfigCheck
from .dims import Dimensions, WeightBits
from .families.family import text_config
from .hf_config import shape_from_config
from .weight_formats import level_of, rounded_bits

EAGLE3 = "eagle3"
_OTHER_KINDS = "dflash", "dspark", "assistant"  # of drafters, which are refused by name
_TAPS = "eagle_aux_hidden_state_layer_ids"  # the layers whose inputs a head reads
_EAGLE_LAYERS = ("llama", "qwen3")  # kinds of layers that EAGLE-3 heads have
_OF_TARGETS = {"layer_types": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 0}
_MTP_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

# Rates at which targets accept a head's tokens, by the least length of the sequence: public figures, of others' runs.
# EAGLE-3: Qwen3-30B-A3B, 2.43 tokens a verification of 3, on LongBench 1.88 with a window (vllm-ascend#10023). MTP:
# Qwen3.8-27B with llama.cpp, 80 to 91 % at 100 tokens, 53 % at 34K and 40 to 55 % at 86K.
PUBLISHED = {EAGLE3: ((0, 0.68), (8_192, 0.5)), MTP: ((0, 0.85), (32_768, 0.53), (65_536, 0.47))}
_GUESS = ((0, 0.6),)


def published_acceptance(kind: str, tokens: int) -> float:
    """Return the rate at which a head's tokens are expected to be accepted in a sequence of `tokens`.

    Of kinds without public figures it is a guess.
    """
    return next(rate for least, rate in reversed(PUBLISHED.get(kind, _GUESS)) if tokens >= least)


@dataclass(frozen=True)
class HeadDimensions(Dimensions):
    """A head's dimensions, for estimates of memory and time; the vocabulary is the head's own.

    Attributes:
        kind: EAGLE3 or MTP.
        row: numbers of each row of the target that is kept for it.
        more: parameters beside layers and output head.
        shares_head: whether the output head is the target's.
    """

    kind: str = field(default=EAGLE3, kw_only=True)
    row: int = field(default=0, kw_only=True)
    more: int = field(default=0, kw_only=True)
    shares_head: bool = field(default=False, kw_only=True)

    @property
    def outer_parameters(self) -> int:
        return self.more + (0 if self.shares_head else self.vocab * self.hidden)

    @property
    def _read_outside(self) -> int:
        return self.more + self.vocab * self.hidden


def drafter_bits(draft: Dimensions, target: WeightBits, itemsize: int) -> WeightBits:
    """Return the bits of a drafter's weights: a head's are rounded if its target's are, those of a model stay."""
    level = level_of(target.layers)
    if level is None or not isinstance(draft, HeadDimensions):
        return WeightBits.of_dtype(itemsize)
    bits, own = rounded_bits(draft, level), draft.outer_parameters
    more = own if draft.shares_head else own - draft.vocab * draft.hidden
    return replace(bits, outer=(more * bits.layers + (own - more) * bits.outer) / own)


def _dimensions(dims: Dimensions, changes: Mapping[str, Any]) -> HeadDimensions:
    return HeadDimensions(**{own.name: getattr(dims, own.name) for own in fields(Dimensions)} | dict(changes))


def mtp_dimensions(target: Dimensions) -> HeadDimensions:
    """Return the dimensions of a target's MTP head: one of its layers that attend to all tokens."""
    experts = target.experts and replace(target.experts, layers=1)
    more = {"layers": 1, "experts": experts, "row": target.hidden, "more": 2 * target.hidden**2}
    return _dimensions(target.full_attention, more | {"kind": MTP, "shares_head": True})


@dataclass(frozen=True)
class HeadShape:
    """The architecture of a head.

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

    @property
    def dimensions(self) -> HeadDimensions:
        """Return its dimensions, as if it had an output head of its own and the target's embedding."""
        own, taps = self.layers, len(self.taps)
        projections = (own.heads + 2 * own.kv_heads) * own.head_dim  # of the first layer, with twice the inputs
        more = own.hidden * (taps * self.target_hidden + projections)
        row = (1 + taps) * self.target_hidden
        if self.kind == MTP:
            projections, row, more = 0, self.target_hidden, 2 * own.hidden**2
        changes = {"vocab": self.vocab, "kind": self.kind, "row": row, "more": more}
        return _dimensions(own, changes | {"shares_head": self.kind == MTP})


def is_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a head, and not a model."""
    return _kind(config) is not None


def _kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of drafter that a config names in its architectures or its type; None of a model."""
    if kind := config.get("speculators_model_type"):
        return str(kind)
    names = f"{config.get('architectures')} {config.get('model_type')}".lower()
    return next((kind for kind in (EAGLE3, *_OTHER_KINDS) if kind in names), None)


def eagle3_shape(config: Mapping[str, Any], target: Dimensions, check: ConfigCheck) -> HeadShape:
    """Return the shape of an EAGLE-3 head.

    Raises SettingsError if it was trained for another target, CheckpointError, UnsupportedModel.
    """
    if (kind := _kind(config) or EAGLE3) != EAGLE3:
        raise UnsupportedModel(f"drafters of the kind {short_repr(kind)} are not supported", f"what runs: {EAGLE3}")
    is_speculators = "speculators_model_type" in config
    own = dict(_part(config, "transformer_layer_config") if is_speculators else config)
    eagle = _part(config, "eagle_config")
    if "hidden_size" not in own:
        raise check.error("hidden_size", None, "the width of the drafter's layers")
    name = own.get("model_type") if own.get("model_type") in _EAGLE_LAYERS else "llama"
    read = {"tie_word_embeddings": False} | own | _OF_TARGETS | {"model_type": name}
    layers = replace(shape_from_config(read, None, check), eos_ids=())
    width = _number(config, "target_hidden_size", layers.hidden, check)
    _check_target("vocabulary", layers.vocab, target.vocab)
    _check_target("hidden size", width, target.hidden)
    ids = config.get(_TAPS) or eagle.get(_TAPS) or [2, target.layers // 2, target.layers - 3]
    is_list = isinstance(ids, list) and all(type(layer) is int and 0 <= layer <= target.layers for layer in ids)
    if not is_list or len(set(ids)) < len(ids):
        raise check.error(_TAPS, ids, f"different numbers of 0 to {target.layers}")
    return HeadShape(
        EAGLE3,
        layers,
        tuple(ids),
        width,
        _number(config, "draft_vocab_size", layers.vocab, check),
        norm_before_residual=bool(config.get("norm_before_residual", is_speculators)),
        norm_before_fc=bool(config.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        window=_window(own),
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


def _window(own: Mapping[str, Any]) -> int | None:
    """Return the window of a head's layers, if they have one."""
    has_window = "sliding_attention" in (own.get("layer_types") or ()) or own.get("use_sliding_window") is True
    window = own.get("sliding_window")
    return window if has_window and type(window) is int and window > 0 else None


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a config; nothing where there is none."""
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(config: Mapping[str, Any], name: str, default: int, check: ConfigCheck) -> int:
    """Return a positive number of a config, `default` where there is none. Raises CheckpointError."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value <= 0:
        raise check.error(name, value, "a positive number")
    return value


def _check_target(what: str, theirs: int, ours: int) -> None:
    """Raise SettingsError for a drafter whose target had another number of something."""
    if theirs != ours:
        raise SettingsError(
            f"the drafter was trained for another target: one with a {what} of {theirs:,}, and this one's is {ours:,}",
            "use a drafter of this target, or --draft lookup",
        )
