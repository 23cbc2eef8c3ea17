"""GGUF files of the llama architecture, in any quantisation that the gguf package dequantises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import load_hf_tokenizer
from .errors import CheckpointError, UnsupportedModel
from .shape import ModelShape, shape_from_config

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
_NAMES = {theirs: ours for ours, theirs in _TENSORS.items()}


class GGUFCheckpoint:
    """One .gguf file; its tensors come dequantised to fp32, under transformers' names and in transformers' layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _read(path)
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise UnsupportedModel(f"the GGUF architecture {architecture} is not supported", "what runs: llama")
        self.generation: dict = {}
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shape = self._shape()

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _shape(self) -> ModelShape:
        from transformers import LlamaConfig

        def need(key: str) -> Any:
            value = self._value(f"llama.{key}")
            if value is None:
                raise CheckpointError(f"{self.path} lacks llama.{key}", "convert the model again")
            return value

        heads, hidden = need("attention.head_count"), need("embedding_length")
        self._refuse(heads, hidden)
        config = LlamaConfig(
            vocab_size=self._tensor("token_embd.weight").shape[1].item(),
            hidden_size=hidden,
            intermediate_size=need("feed_forward_length"),
            num_hidden_layers=need("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self._value("llama.attention.head_count_kv", heads),
            head_dim=self._value("llama.attention.key_length", hidden // heads),
            max_position_embeddings=need("context_length"),
            rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
            rope_parameters=self._rope(),
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            tie_word_embeddings="output.weight" not in self._tensors,
            eos_token_id=self._value("tokenizer.ggml.eos_token_id"),
            bos_token_id=self._value("tokenizer.ggml.bos_token_id"),
        )
        extra = {"eos_token_id": self._value("tokenizer.ggml.eot_token_id")}
        divisors = self._tensors.get("rope_freqs.weight")  # llama.cpp stores Llama 3's scaling as a tensor
        return shape_from_config(config, extra, None if divisors is None else tuple(map(float, divisors.data)))

    def _refuse(self, heads: Any, hidden: int) -> None:
        """What goes by the name llama, but is not what the decoder computes."""
        only = "what runs: dense models with the same heads in every layer and RoPE on whole heads"
        if isinstance(heads, list):
            raise UnsupportedModel("GGUF models whose layers differ in their heads are not supported", only)
        if self._value("llama.expert_count", 0):
            raise UnsupportedModel("mixtures of experts (Mixtral) are not supported", only)
        head_dim = self._value("llama.attention.key_length", hidden // heads)
        if self._value("llama.rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModel("RoPE on a part of each head is not supported", only)

    def _rope(self) -> dict:
        rope = {"rope_type": "default", "rope_theta": self._value("llama.rope.freq_base", 10000.0)}
        kind = self._value("llama.rope.scaling.type", "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(f"the GGUF RoPE scaling {kind} is not supported", "what runs: none, linear, yarn")
        rope |= {"rope_type": kind, "factor": float(self._value("llama.rope.scaling.factor", 1.0))}
        original = self._value("llama.rope.scaling.original_context_length")
        if kind == "yarn" and original:
            rope["original_max_position_embeddings"] = original
        return rope

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}", "convert the model again")
        return self._tensors[name]

    def files(self) -> list[Path]:
        return [self.path]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        end = self.path.stat().st_size
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > end:
                raise CheckpointError(f"{self.path} is truncated inside {tensor.name}", "fetch the model again")
        known = {name: _transformers_name(name) for name in self._tensors}
        return {ours: tuple(map(int, self._tensors[name].shape[::-1])) for name, ours in known.items() if ours}

    @contextmanager
    def tensors(self) -> Iterator[Any]:
        names = {_transformers_name(name): name for name in self._tensors}
        # Quantised in blocks, and reordered: a tensor is made whole, then cut.
        yield lambda name, part=None: self._dequantised(names[name])[part or ...]

    def _dequantised(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: {name} is quantised as {tensor.tensor_type.name}", str(error)
            ) from error
        heads = {"attn_q": self.shape.heads, "attn_k": self.shape.kv_heads}.get(name.split(".")[-2])
        return weight if heads is None else _unpermute(weight, heads)

    def load_tokenizer(self) -> Any:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        return load_hf_tokenizer(self.path.parent, {"gguf_file": self.path.name})


def _read(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # a damaged file trips the reader at any point, with any exception
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}", "fetch the model again") from error


def _transformers_name(name: str) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; None for tensors that are no weights."""
    *middle, stem, kind = name.split(".")
    if stem not in _NAMES:
        return None
    if middle:
        return f"model.layers.{middle[1]}.{_NAMES[stem]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of q and k rows: its RoPE pairs neighbours, transformers' pairs halves."""
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, rows, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()
