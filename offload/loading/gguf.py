"""Reads GGUF files of the llama architecture, in every quantisation that the gguf package dequantises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape, shape_from_config
from ..architecture.config_checks import ConfigCheck
from ..errors import CheckpointError, UnsupportedModel
from ..short_repr import short_repr, short_text
from .gguf_header import check_metadata
from .tokenizer import Tokenizer
from .tokenizer_files import load_hf_tokenizer

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
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
_NAMES = {theirs: ours for ours, theirs in _TENSORS.items()}
_STORED = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")


class GGUFCheckpoint:
    """One .gguf file. Its tensors are dequantised to fp32, with transformers' names and layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _read(path)
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise UnsupportedModel(
                f"the GGUF architecture {short_text(str(architecture))} is not supported", "what runs: llama"
            )
        self.generation: dict = {}
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shape = self._shape()

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
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
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
        table = self._tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise CheckpointError(f"{self.path} lacks the matrix token_embd.weight", "convert the model again")
        return int(table.shape[-1])

    def _divisors(self, wanted: int) -> tuple[float, ...] | None:
        """Read the divisor of each frequency, as llama.cpp stores Llama 3's RoPE scaling. Raises CheckpointError."""
        if "rope_freqs.weight" not in self._tensors:
            return None
        divisors = self._stored("rope_freqs.weight")
        if divisors.shape != (wanted,) or not (torch.isfinite(divisors) & (divisors > 0)).all():
            raise CheckpointError(
                f"{self.path}: rope_freqs.weight is {short_repr(divisors.flatten().tolist())}, "
                f"not {wanted} positive numbers",
                "fetch or convert the model again",
            )
        return tuple(divisors.tolist())

    def files(self) -> list[Path]:
        return [self.path]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        self._check_layout()
        known = {name: _transformers_name(name) for name in self._tensors}
        return {ours: tuple(map(int, self._tensors[name].shape[::-1])) for name, ours in known.items() if ours}

    def _check_layout(self) -> None:
        """Check that the tensors follow each other, each aligned, as the format requires. Raises CheckpointError."""
        end, offset, alignment = self.path.stat().st_size, self._reader.data_offset, int(self._reader.alignment)
        for tensor in self._reader.tensors:
            if tensor.data_offset != offset:
                raise CheckpointError(f"{self.path} is corrupt: {tensor.name} is misplaced", "fetch the model again")
            if offset + tensor.n_bytes > end:
                raise CheckpointError(f"{self.path} is truncated inside {tensor.name}", "fetch the model again")
            offset += -(-tensor.n_bytes // alignment) * alignment

    @contextmanager
    def tensors(self) -> Iterator[Any]:
        names = {_transformers_name(name): name for name in self._tensors}
        # Quantised in blocks and with permuted rows: dequantise the whole tensor, then slice it.
        yield lambda name, part=None: self._dequantised(names[name])[part or ...]

    def _dequantised(self, name: str) -> Tensor:
        weight = self._stored(name)
        heads = {"attn_q": self.shape.heads, "attn_k": self.shape.kv_heads}.get(name.split(".")[-2])
        return weight if heads is None else _unpermute(weight, heads)

    def _stored(self, name: str) -> Tensor:
        """Return a dequantised tensor in the layout of the file. Raises UnsupportedModel."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: {name} is quantised as {tensor.tensor_type.name}", str(error)
            ) from error

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_transformers(self.hf_tokenizer)

    @cached_property
    def hf_tokenizer(self) -> Any:
        """Return transformers' tokenizer, which knows how to build one from GGUF metadata. Raises CheckpointError."""
        return load_hf_tokenizer(self.path.parent, {"gguf_file": self.path.name})


def _read(path: Path) -> Any:
    from gguf import GGUFReader

    check_metadata(path)
    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises any exception for a damaged file
        raise CheckpointError(
            f"{path} is corrupt, or not a GGUF file that can be read: {short_text(str(error))}", "fetch the model again"
        ) from error


def _transformers_name(name: str) -> str | None:
    """Map blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; None for a tensor that is not a weight."""
    match = _STORED.fullmatch(name)
    if match is None or match["stem"] not in _NAMES:
        return None
    layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{layer}{_NAMES[match['stem']]}.{match['kind']}"


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's permutation of q and k rows: its RoPE pairs neighbours, transformers' pairs halves."""
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, rows, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()
