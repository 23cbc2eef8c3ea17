#!/usr/bin/env python3
"""Write a GGUF file with random weights in the shape of a known model: for benchmarks, where only times matter.

    python scripts/random_gguf.py llama-3.2-1b model.gguf --format Q4_K_M

Its tokenizer is byte-level BPE with as many tokens and merges as the known model has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from random_model import SHAPES
from tokenizers.pre_tokenizers import ByteLevel

# Architecture, head dimension, vocabulary, whether q and k are normalised, and how texts are split.
_GGUF = {
    "llama-3.2-1b": ("llama", 64, 128_256, False, "llama-bpe"),
    "qwen3-4b": ("qwen3", 128, 151_936, True, "qwen2"),
    "tiny": ("llama", 64, 1024, False, "llama-bpe"),
}
# llama-quantize's names -> the types of most matrices, of some layers' v and down projections, and of the embedding.
FORMATS = {
    "Q4_0": (Type.Q4_0, Type.Q4_0, Type.Q6_K),
    "Q4_K_M": (Type.Q4_K, Type.Q6_K, Type.Q6_K),
    "Q5_K_M": (Type.Q5_K, Type.Q6_K, Type.Q6_K),
    "Q6_K": (Type.Q6_K, Type.Q6_K, Type.Q6_K),
    "Q8_0": (Type.Q8_0, Type.Q8_0, Type.Q8_0),
    "IQ4_XS": (Type.IQ4_XS, Type.Q5_K, Type.Q6_K),
    "BF16": (Type.BF16, Type.BF16, Type.BF16),
}
# Where a block's fp16 factors are, and by what 1 / sqrt(inputs) is multiplied there: the other bytes are random.
_FACTORS = {
    Type.Q4_0: {0: 1 / 4.6},
    Type.Q8_0: {0: 1 / 74},
    Type.Q4_K: {0: 1 / 255, 2: 7.5 / 255},
    Type.Q5_K: {0: 1 / 520, 2: 15.5 / 520},
    Type.Q6_K: {208: 1 / 1367},
    Type.IQ4_XS: {0: 1 / 1300},
}


def write_random_gguf(path: Path, name: str, format: str) -> Path:
    """Write a GGUF file of the shape `name` in one of `FORMATS`, unless it is there, and return its path."""
    if path.is_file():
        return path
    hidden, width, layers, heads, kv_heads = SHAPES[name]
    architecture, head_dim, vocab, has_norms, pre = _GGUF[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(part := path.with_suffix(".part"), architecture)
    writer.add_context_length(2**17)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer, vocab, pre)
    most, some, outer = FORMATS[format]
    random = np.random.default_rng(0)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    _add_matrix(writer, "token_embd", (vocab, hidden), outer, random)
    q, kv = heads * head_dim, kv_heads * head_dim
    matrices = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
    matrices |= {"ffn_gate": (width, hidden), "ffn_up": (width, hidden), "ffn_down": (hidden, width)}
    norms = {"attn_norm": hidden, "ffn_norm": hidden} | ({"attn_q_norm": 128, "attn_k_norm": 128} if has_norms else {})
    for layer in range(layers):
        for norm, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(size, np.float32))
        eighth = layers // 8
        is_finer = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        for matrix, size in matrices.items():
            kind = some if is_finer and matrix in ("attn_v", "ffn_down") else most
            _add_matrix(writer, f"blk.{layer}.{matrix}", size, kind, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(path)


def _add_matrix(writer: gguf.GGUFWriter, name: str, size: tuple[int, int], kind: Type, random: np.random.Generator):
    """Add a matrix `[rows, inputs]` whose products are as large as what it multiplies."""
    (rows, inputs), (weights, bytes_) = size, gguf.GGML_QUANT_SIZES[kind]
    if kind == Type.BF16:
        values = torch.randn(size, generator=torch.Generator().manual_seed(int(random.integers(2**31))))
        data = (values * inputs**-0.5).bfloat16().view(torch.uint8).numpy()
    else:
        blocks = np.frombuffer(random.bytes(rows * inputs // weights * bytes_), np.uint8).reshape(-1, bytes_).copy()
        for place, factor in _FACTORS[kind].items():
            blocks[:, place : place + 2] = np.array([factor * inputs**-0.5], np.float16).view(np.uint8)
        data = blocks.reshape(rows, -1)
    writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int, pre: str) -> None:
    pairs = list(_pairs(vocab - 512))
    special = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(254))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), *map("".join, pairs), *special])
    writer.add_token_types([gguf.TokenType.NORMAL] * (vocab - 256) + [gguf.TokenType.CONTROL] * 256)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(vocab - 256)
    writer.add_eos_token_id(vocab - 255)


def _pairs(count: int) -> Iterator[tuple[str, str]]:
    """Yield merges of a random vocabulary, each of tokens that are there."""
    tokens, random = sorted(ByteLevel.alphabet()), np.random.default_rng(1)
    known = set(tokens)
    while count:
        left, right = tokens[int(random.integers(len(tokens)) * random.random())], tokens[int(random.integers(256))]
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            count -= 1
            yield left, right


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=_GGUF)
    parser.add_argument("path", type=Path)
    parser.add_argument("--format", choices=FORMATS, default="Q4_K_M")
    args = parser.parse_args()
    write_random_gguf(args.path, args.shape, args.format)


if __name__ == "__main__":
    sys.exit(main())
