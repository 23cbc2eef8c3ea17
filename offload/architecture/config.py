"""Reads a model's dimensions and features from its config, and refuses models that the decoder cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModel
from ..short_repr import short_repr
from .config_checks import check_of_config, window_in_use, within_vocabulary
from .dims import Dimensions

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class ModelShape(Dimensions):
    """The dimensions and features of a decoder.

    `context` is the longest sequence, in tokens, that the model supports with full attention:
    `max_position_embeddings` times its RoPE scaling, or its sliding window if that is shorter.
    """

    family: str
    norm_eps: float
    context: int
    sliding_window: int | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    hf_config: Any  # transformers' config, kept for its RoPE functions
    rope_divisors: tuple[float, ...] | None = None  # one per frequency, from the tensor of a GGUF file

    @property
    def rope_depends_on_length(self) -> bool:
        """Return whether the angles at a position depend on the longest length of the sequence."""
        return (self.hf_config.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope")


def positions_of(rope: Mapping[str, Any], positions: int) -> int:
    """Return how many positions a model supports, from its RoPE parameters and `max_position_embeddings`.

    Configs give that number after scaling for llama3 and longrope, before scaling for others.
    """
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if kind == "yarn":
        return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
    return int(positions * factor) if kind in ("linear", "dynamic") else positions


def _refuse(config: Any) -> None:
    supported = f"what runs: {', '.join(FAMILIES)}, unquantised, with RoPE {', '.join(ROPE_TYPES)}"
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(f"the architecture {config.model_type} is not supported", supported)
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise UnsupportedModel(f"the RoPE type {short_repr(rope.get('rope_type'))} is not supported", supported)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("RoPE on a part of each head (partial_rotary_factor) is not supported", supported)
    if getattr(config, "quantization_config", None):
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise UnsupportedModel(
            f"this checkpoint is quantised ({method})", "use the unquantised model, or a GGUF file of it"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModel(f"the activation {short_repr(config.hidden_act)} is not supported", supported)


def _features(config: Any) -> dict[str, Any]:
    """Return the family, and which of its linears have a bias and whether it normalises q and k.

    Qwen2 always has a bias on q, k and v. Llama and Qwen3 have one on q, k, v and the output with `attention_bias`.
    """
    family = config.model_type
    attention_bias = bool(getattr(config, "attention_bias", False))
    return {
        "family": family,
        "qkv_bias": attention_bias or family == "qwen2",
        "o_bias": attention_bias and family in ("llama", "qwen3"),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)) and family == "llama",
        "qk_norm": family == "qwen3",
    }


def shape_from_config(config: Any, generation: dict, rope_divisors: tuple[float, ...] | None = None) -> ModelShape:
    """Read a transformers config.

    Args:
        config: a `PreTrainedConfig` made from values that `config_checks` has passed.
        generation: the values of generation_config.json; its end-of-sequence ids join the config's.
        rope_divisors: `[head_dim / 2]`, see ModelShape.

    Raises:
        UnsupportedModel: for any other architecture, RoPE type, activation or for quantised weights.
        CheckpointError: for end-of-sequence ids that are none.
    """
    _refuse(config)
    named = (getattr(config, name, None) for name in ("sliding_window", "use_sliding_window"))
    window = window_in_use(config.model_type, *named)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = positions_of(config.rope_parameters or {}, config.max_position_embeddings)
    check = check_of_config("the model's configuration")
    eos = [id for ids in (config.eos_token_id, generation.get("eos_token_id")) for id in check.token_ids(ids)]
    return ModelShape(
        **_features(config),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        context=min(context, window or context),
        sliding_window=window,
        tied_embeddings=bool(config.tie_word_embeddings),
        eos_ids=within_vocabulary(eos, config.vocab_size),
        hf_config=config,
        rope_divisors=rope_divisors,
    )
