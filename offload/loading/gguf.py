"""Reads GGUF files of the llama architecture: shape, tokenizer and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..architecture.config import ModelShape, shape_from_config
from ..architecture.config_checks import ConfigCheck
from ..errors import CheckpointError, UnsupportedModel
from ..short_repr import short_repr, short_text
from .gguf_tensors import GGUFTensors, open_gguf
from .safetensors import TensorReader
from .tokenizer import Tokenizer
from .tokenizer_files import load_hf_tokenizer

_KEYS = {
    "num_hidden_layers": "llama.block_count",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "eot_token_id": "tokenizer.ggml.eot_token_id",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
}
_NEEDED = (
    *("num_attention_heads", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_ROPE_KEYS = {
    "rope_theta": "llama.rope.freq_base",
    "factor": "llama.rope.scaling.factor",
    "original_max_position_embeddings": "llama.rope.scaling.original_context_length",
}


class GGUFCheckpoint:
    """One .gguf file, with transformers' names and layout of tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_gguf(path)
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise UnsupportedModel(
                f"the GGUF architecture {short_text(str(architecture))} is not supported", "what runs: llama"
            )
        self.generation: dict = {}
        self._sizes = {tensor.name: tensor.shape for tensor in self._reader.tensors}
        self.shape = self._shape()
        self._tensors = GGUFTensors(path, self.shape.heads, self.shape.kv_heads, self._reader)

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _shape(self) -> ModelShape:
        """Read the shape from the metadata. Raises CheckpointError, UnsupportedModel."""
        values = {ours: self._value(key) for ours, key in _KEYS.items() if self._reader.get_field(key) is not None}
        if missing := [_KEYS[name] for name in _NEEDED if name not in values]:
            raise CheckpointError(f"{self.path} lacks {missing[0]}", "convert the model again")
        self._refuse(values)
        check = ConfigCheck(str(self.path), _KEYS | _ROPE_KEYS, "fetch or convert the model again")
        extra = {"eos_token_id": check.token_ids(values.pop("eot_token_id", None), "eot_token_id")}
        self.config = {"eos_token_id": None} | values
        self.config |= {
            "model_type": "llama",
            "vocab_size": self._vocabulary(),
            "rope_parameters": self._rope(),
            "attention_bias": "blk.0.attn_q.bias" in self._sizes,
            "tie_word_embeddings": "output.weight" not in self._sizes,
        }
        shape = shape_from_config(self.config, extra, check=check)
        if self._value("llama.rope.dimension_count", shape.head_dim) != shape.head_dim:
            raise UnsupportedModel(
                "RoPE on a part of each head is not supported", "what runs: dense models with RoPE on whole heads"
            )
        return replace(shape, rope_divisors=self._divisors(shape.head_dim // 2))

    def _refuse(self, values: dict[str, Any]) -> None:
        """Raise UnsupportedModel for llama variants that the decoder does not compute."""
        only = "what runs: dense models with the same heads in every layer and RoPE on whole heads"
        if isinstance(values["num_attention_heads"], list) or isinstance(values.get("num_key_value_heads"), list):
            raise UnsupportedModel("GGUF models whose layers differ in their heads are not supported", only)
        if self._value("llama.expert_count", 0):
            raise UnsupportedModel("mixtures of experts (Mixtral) are not supported", only)

    def _rope(self) -> dict:
        """Return the RoPE parameters under transformers' names. Raises UnsupportedModel."""
        rope = {"rope_type": "default", "rope_theta": self._value(_ROPE_KEYS["rope_theta"], 10000.0)}
        kind = self._value("llama.rope.scaling.type", "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(
                f"the GGUF RoPE scaling {short_repr(kind)} is not supported", "what runs: none, linear, yarn"
            )
        rope |= {"rope_type": kind, "factor": self._value(_ROPE_KEYS["factor"], 1.0)}
        original = self._value(_ROPE_KEYS["original_max_position_embeddings"])
        if kind == "yarn" and original != 0 and original is not None:  # 0 is "not set", as in llama.cpp
            rope["original_max_position_embeddings"] = original
        return rope

    def _vocabulary(self) -> int:
        """Return the vocabulary's size, from the embedding table. Raises CheckpointError."""
        size = self._sizes.get("token_embd.weight", ())
        if len(size) != 2:
            raise CheckpointError(f"{self.path} lacks the matrix token_embd.weight", "convert the model again")
        return int(size[-1])

    def _divisors(self, wanted: int) -> tuple[float, ...] | None:
        """Read the divisor of each frequency, as llama.cpp stores Llama 3's RoPE scaling. Raises CheckpointError."""
        if "rope_freqs.weight" not in self._sizes:
            return None
        divisors = GGUFTensors(self.path, 1, 1, self._reader).dequantized("rope_freqs.weight")
        if divisors.shape != (wanted,) or not (torch.isfinite(divisors) & (divisors > 0)).all():
            raise CheckpointError(
                f"{self.path}: rope_freqs.weight is {short_repr(divisors.flatten().tolist())}, "
                f"not {wanted} positive numbers",
                "fetch or convert the model again",
            )
        return tuple(divisors.tolist())

    @property
    def is_quantized(self) -> bool:
        return self._tensors.is_quantized

    def files(self) -> list[Path]:
        return [self.path]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return self._tensors.sizes()

    def quantized_bits(self) -> dict[str, float]:
        return self._tensors.quantized_bits()

    @contextmanager
    def tensors(self) -> Iterator[TensorReader]:
        yield self._tensors

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_transformers(self.hf_tokenizer)

    @cached_property
    def hf_tokenizer(self) -> Any:
        """Return transformers' tokenizer, which knows how to build one from GGUF metadata. Raises CheckpointError."""
        return load_hf_tokenizer(self.path.parent, {"gguf_file": self.path.name})
