#!/usr/bin/env python3
"""Write a model with random weights in the shape of a known model: for benchmarks, where times matter and texts do not.

    python scripts/random_model.py llama-3.2-1b folder/

Its tokenizer has one token for each id, and none for a text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32_000
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32),
    "llama-68m": (768, 3072, 2, 12, 12),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8),
    "qwen3-4b": (2560, 9728, 36, 32, 8),
    "tiny": (256, 512, 2, 4, 4),
}


def write_random_model(folder: Path, name: str, device: str = "cpu") -> Path:
    """Write a Llama of the shape `name` in bf16 and return its folder; weights are drawn on `device`."""
    sizes = dict(zip(_NAMES, SHAPES[name], strict=True))
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=2**17, dtype="bfloat16", **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    Tokenizer(WordLevel({f"<{number}>": number for number in range(VOCAB)}, "<0>")).save(str(folder / "tokenizer.json"))
    with torch.device("meta"):
        weights = list(LlamaForCausalLM(config).state_dict().items())
    places: dict[str, str] = {}
    for first in range(0, len(weights), 32):  # tensors in a file
        file = f"model-{first:05}.safetensors"
        part = {weight: _random(tensor.shape, device) for weight, tensor in weights[first : first + 32]}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    return folder


def _random(size: torch.Size, device: str) -> Tensor:
    """Return a norm of ones, or a matrix whose products are as large as what it multiplies."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, device=device) * size[1] ** -0.5).bfloat16().cpu()


def main() -> None:
    """Write the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_random_model(args.folder, args.shape)


if __name__ == "__main__":
    sys.exit(main())
