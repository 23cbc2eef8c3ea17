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
_OPTIONAL = ("num_key_value_heads", "head_dim")
_HINT = "fetch or convert the model again"
_SAFETENSORS = "use the model's safetensors"
_UNSUPPORTED = {  # keys that are absent or zero in what runs -> what others have
    "expert_count": "mixtures of experts of this architecture",
    "expert_shared_count": "experts that all tokens share",
    "expert_group_count": "groups of experts",
    "attention.sliding_window": "sliding windows in this architecture",
    "rope.dimension_sections": "RoPE on several axes, as in models that read images,",
    "nextn_predict_layers": "layers that predict further tokens",
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
        if name := next(self._tensors.unused(self.shape), None):
            raise UnsupportedModel(f"GGUF models with the tensor {short_text(name)} are not supported", _SAFETENSORS)

    def _find_family(self) -> Family:
        """Return the family of the file's architecture. Raises UnsupportedModel."""
        architecture = self._value("general.architecture")
        if architecture not in GGUF_FAMILIES:
            raise UnsupportedModel(
                f"the GGUF architecture {short_text(str(architecture))} is not supported",
                f"what runs: {', '.join(GGUF_FAMILIES)}",
            )
        family = GGUF_FAMILIES[architecture]
        has_experts = family.gguf.sparse and self._value(f"{architecture}.expert_count")
        return FAMILIES[family.gguf.sparse] if has_experts else family

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _own(self, key: str, default: Any = None) -> Any:
        """Return the value of a key behind the architecture's name."""
        return self._value(f"{self._family.gguf.architecture}.{key}", default)

    def _shape(self) -> ModelShape:
        """Read the shape from the metadata. Raises CheckpointError, UnsupportedModel."""
        names = self._family.gguf
        keys = _KEYS | dict(names.keys)
        values = {ours: value for ours, key in keys.items() if (value := self._own(key)) is not None}
        if missing := [keys[name] for name in _KEYS if name not in values and name not in _OPTIONAL]:
            raise CheckpointError(f"{self.path} lacks {missing[0]}", _HINT)
        self._refuse_variants(values)
        if values.get("sliding_window") == 0:  # "not set", as in llama.cpp
            values["sliding_window"] = None
        check = ConfigCheck(str(self.path), _HINT)
        ids = {f"{name}_token_id": self._value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "bos", "eot")}
        extra = {"eos_token_id": check.token_ids(ids.pop("eot_token_id"))}
        self.config = {**names.left_out, **values, **ids}
        self.config |= {
            "model_type": self._family.name,
            "vocab_size": int(self._sizes["token_embd.weight"][-1]) if "token_embd.weight" in self._sizes else None,
            "rope_parameters": self._rope(),
            "attention_bias": "blk.0.attn_q.bias" in self._sizes,
            "tie_word_embeddings": "output.weight" not in self._sizes,
        }
        shape = shape_from_config(self.config, extra, check=check)
        rotated = self._own("rope.dimension_count", shape.rotary_dim)
        if rotated != shape.rotary_dim:
            if not self._family.has_partial_rope:
                raise UnsupportedModel("RoPE on a part of each head is not supported", _SAFETENSORS)
            self.config["rope_parameters"]["partial_rotary_factor"] = rotated / shape.head_dim
            shape = shape_from_config(self.config, extra, check=check)
        if names.adds_norm_offset:
            shape = replace(shape, norm_offset=0.0)
        return replace(shape, rope_divisors=self._divisors(shape.rotary_dim // 2))

    def _refuse_variants(self, values: dict[str, Any]) -> None:
        """Raise UnsupportedModel for variants that the decoder would compute as the plain model, and wrongly."""
        names = self._family.gguf
        if isinstance(values["num_attention_heads"], list) or isinstance(values.get("num_key_value_heads"), list):
            raise UnsupportedModel("GGUF models whose layers differ in their heads are not supported", _SAFETENSORS)
        for key, what in _UNSUPPORTED.items():
            value = self._own(key)
            if key not in names.keys.values() and (any(value) if isinstance(value, list) else value):
                raise UnsupportedModel(f"{what} are not supported ({key} is {short_repr(value)})", _SAFETENSORS)
        for key in names.switches:
            if self._own(key) is False:
                raise UnsupportedModel(f"{self._family.name} with {key} false is not supported", _SAFETENSORS)
        if "rope_factors_long.weight" in self._sizes:
            raise UnsupportedModel("GGUF models with longrope are not supported", _SAFETENSORS)

    def _rope(self) -> dict:
        """Return the RoPE parameters under transformers' names. Raises UnsupportedModel."""
        rope = {"rope_type": "default", "rope_theta": self._own("rope.freq_base", 10000.0)}
        kind = self._own("rope.scaling.type", "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(f"the GGUF RoPE scaling {short_repr(kind)} is not supported", _SAFETENSORS)
        rope |= {"rope_type": kind, "factor": self._own("rope.scaling.factor", 1.0)}
        original = self._own("rope.scaling.original_context_length")
        if kind == "yarn" and original:  # 0 is "not set", as in llama.cpp
            rope["original_max_position_embeddings"] = original
        return rope | dict(self._family.gguf.yarn) if kind == "yarn" else rope

    def _divisors(self, wanted: int) -> tuple[float, ...] | None:
        """Read the divisor of each frequency, as llama.cpp stores Llama 3's RoPE scaling. Raises CheckpointError."""
        if "rope_freqs.weight" not in self._sizes:
            return None
        divisors = GGUFTensors(self.path, 1, 1, self._reader).dequantized("rope_freqs.weight")
        if divisors.shape != (wanted,) or not (torch.isfinite(divisors) & (divisors > 0)).all():
            raise CheckpointError(f"{self.path}: rope_freqs.weight is not {wanted} positive numbers", _HINT)
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
