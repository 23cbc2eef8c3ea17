"""Reads GGUF files: shape, tokenizer and tensors."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...architecture.config import ModelShape
from ...architecture.config_checks import ConfigCheck
from ...architecture.families import FAMILIES, GGUF_FAMILIES, Family
from ...architecture.hf_config import shape_from_config
from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_repr, short_text
from ..tokenizers.gguf_tokenizer import tokenizer_from_metadata
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.tokenizer_files import load_hf_tokenizer
from .gguf_header import refuse_unused, refuse_variants
from .gguf_tensors import GGUFTensors, open_gguf
from .safetensors import TensorReader

_KEYS = {  # behind the name of the architecture
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_TOKEN_KEYS = {
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "eot_token_id": "tokenizer.ggml.eot_token_id",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
}
_NEEDED = (
    *("num_attention_heads", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_ROPE_KEYS = {
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


class GGUFCheckpoint:
    """One .gguf file, with transformers' names and layout of tensors."""

    skipped = 0  # other parts of a model have files of their own
    quantization = ""  # a tensor's type is in the file

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_gguf(path)
        self._family = self._find_family()
        self.generation: dict = {}
        self._sizes = {tensor.name: tensor.shape for tensor in self._reader.tensors}
        self.shape = self._shape()
        names = self._family.gguf
        self._tensors = GGUFTensors(path, self.shape.heads, self.shape.kv_heads, self._reader, names)
        refuse_unused(self._tensors.unused(self.shape))

    def _find_family(self) -> Family:
        """Return the family of the file's architecture. Raises UnsupportedModel."""
        architecture = self._value("general.architecture")
        if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
            raise UnsupportedModel(
                f"the GGUF architecture {short_text(str(architecture))} is not supported",
                f"what runs: {', '.join(GGUF_FAMILIES)}",
            )
        family = GGUF_FAMILIES[architecture]
        has_experts = family.gguf.sparse and self._value(f"{architecture}.expert_count")
        return FAMILIES[family.gguf.sparse] if has_experts else family

    def _key(self, name: str) -> str:
        """Return a key of the file's architecture."""
        return f"{self._family.gguf.architecture}.{name}"

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _shape(self) -> ModelShape:
        """Read the shape from the metadata. Raises CheckpointError, UnsupportedModel."""
        keys = {ours: self._key(name) for ours, name in (_KEYS | dict(self._family.gguf.keys)).items()} | _TOKEN_KEYS
        values = {ours: self._value(key) for ours, key in keys.items() if self._reader.get_field(key) is not None}
        if missing := [keys[name] for name in _NEEDED if name not in values]:
            raise CheckpointError(f"{self.path} lacks {missing[0]}", "convert the model again")
        refuse_variants(self._family, lambda name: self._value(self._key(name)), values, self._sizes)
        if values.get("sliding_window") == 0:  # "not set", as in llama.cpp
            values["sliding_window"] = None
        rope_keys = {ours: self._key(name) for ours, name in _ROPE_KEYS.items()}
        check = ConfigCheck(str(self.path), keys | rope_keys, "fetch or convert the model again")
        extra = {"eos_token_id": check.token_ids(values.pop("eot_token_id", None), "eot_token_id")}
        self.config = {"eos_token_id": None} | dict(self._family.gguf.left_out) | values
        self.config |= {
            "model_type": self._family.name,
            "vocab_size": self._vocabulary(),
            "rope_parameters": self._rope(),
            "attention_bias": "blk.0.attn_q.bias" in self._sizes,
            "tie_word_embeddings": "output.weight" not in self._sizes,
        }
        shape = shape_from_config(self.config, extra, check=check)
        rotated = self._value(self._key("rope.dimension_count"), shape.rotary_dim)
        if rotated != shape.rotary_dim:
            shape = self._partial(shape, rotated, extra, check)
        if self._family.gguf.adds_norm_offset:
            shape = replace(shape, norm_offset=0.0)
        return replace(shape, rope_divisors=self._divisors(shape.rotary_dim // 2))

    def _partial(self, shape: ModelShape, rotated: Any, extra: dict, check: ConfigCheck) -> ModelShape:
        """Return the shape with RoPE on the first `rotated` dimensions of a head. Raises UnsupportedModel."""
        if not self._family.has_partial_rope or type(rotated) is not int or rotated % 2:
            raise UnsupportedModel(
                "RoPE on a part of each head is not supported", "what runs: dense models with RoPE on whole heads"
            )
        self.config["rope_parameters"]["partial_rotary_factor"] = rotated / shape.head_dim
        return shape_from_config(self.config, extra, check=check)

    def _rope(self) -> dict:
        """Return the RoPE parameters under transformers' names. Raises UnsupportedModel."""
        rope = {"rope_type": "default", "rope_theta": self._value(self._key(_ROPE_KEYS["rope_theta"]), 10000.0)}
        kind = self._value(self._key("rope.scaling.type"), "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(
                f"the GGUF RoPE scaling {short_repr(kind)} is not supported", "what runs: none, linear, yarn"
            )
        rope |= {"rope_type": kind, "factor": self._value(self._key(_ROPE_KEYS["factor"]), 1.0)}
        original = self._value(self._key(_ROPE_KEYS["original_max_position_embeddings"]))
        if kind == "yarn" and original != 0 and original is not None:  # 0 is "not set", as in llama.cpp
            rope["original_max_position_embeddings"] = original
        return rope | dict(self._family.gguf.yarn) if kind == "yarn" else rope

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

    def tensors(self) -> AbstractContextManager[TensorReader]:
        return self._tensors.opened()

    def load_tokenizer(self) -> Tokenizer:
        if self._family.gguf.reads_tokenizer:
            return tokenizer_from_metadata(self._value)
        return Tokenizer.from_transformers(self.hf_tokenizer)

    @cached_property
    def hf_tokenizer(self) -> Any:
        """Return transformers' tokenizer, which knows how to build one from GGUF metadata. Raises CheckpointError."""
        return load_hf_tokenizer(self.path.parent, {"gguf_file": self.path.name})
