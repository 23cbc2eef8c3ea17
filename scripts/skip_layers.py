"""Write the embedded model without some of its layers: a draft model for itself, with its 4-bit weights.

    python scripts/skip_layers.py draft --skip 4,5,12-19,23,25,26
    triforce bench -f book.txt --methods triforce --draft draft

Nothing is trained: what is left agrees with the whole model as far as it goes (as in Draft & Verify, arXiv 2309.08168).
`--find 13` chooses that many layers, one after the other: each time the one without which the distributions of the next
token overlap most with the whole model's, over a part of the book in `examples/`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFReader, GGUFWriter

from offload import EngineConfig, open_model
from offload.loading.hub.download import locate

MODEL, BOOK = "smollm2-135m", Path(__file__).parents[1] / "examples" / "frankenstein.txt"
SCORED, GIVEN = 256, 192  # tokens


def write(source: Path, target: Path, skipped: Sequence[int]) -> None:
    """Copy a model's folder without the layers `skipped`; tensors keep their bytes."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    kept = [layer for layer in range(config["num_hidden_layers"]) if layer not in skipped]
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}), "utf-8")
    writer = GGUFWriter(target / "model.gguf", config["model_type"])
    for tensor in GGUFReader(source / "model.gguf").tensors:
        first, is_layer, rest = tensor.name.partition("blk.")
        layer, _, part = rest.partition(".")
        if is_layer and int(layer) not in kept:
            continue
        name = f"{first}blk.{kept.index(int(layer))}.{part}" if is_layer else tensor.name
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def find(count: int) -> list[int]:
    """Return `count` layers to skip; neither the first nor the last one is among them. Prints the overlaps."""
    opened = open_model(EngineConfig(MODEL))
    text = BOOK.read_text("utf-8")[200_000:203_000]
    loaded, ids = opened.load().model, opened.tokenizer.encode(text, special_tokens=True)[: GIVEN + SCORED]
    layers = list(loaded.layers())

    @torch.inference_mode()
    def distributions(kept: Sequence[int]) -> torch.Tensor:
        part = loaded.with_weights([layers[layer] for layer in kept])
        rows = part.forward(torch.tensor(ids), loaded.new_cache(len(ids)))
        return part.logits(rows[GIVEN:]).float().softmax(-1)

    kept = list(range(len(layers)))
    whole = distributions(kept)

    def overlap(without: int) -> float:
        found = distributions([layer for layer in kept if layer != without])
        return float(torch.minimum(found, whole).sum(-1).mean())

    for _ in range(count):
        best, layer = max((overlap(layer), layer) for layer in kept[1:-1])
        kept.remove(layer)
        print(f"{len(kept)} layers, without {layer}: overlap {best:.3f}", flush=True)
    return [layer for layer in range(len(layers)) if layer not in kept]


def _layers(text: str) -> list[int]:
    ranges = (part.partition("-") for part in text.split(","))
    return [layer for first, _, last in ranges for layer in range(int(first), int(last or first) + 1)]


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a folder, which is made")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--skip", type=_layers, metavar="LIST", help="layers from 0 on, such as 4,12-19")
    chosen.add_argument("--find", type=int, metavar="COUNT", help="how many to skip; 5 minutes for 13 of 30")
    args = parser.parse_args()
    skipped = args.skip or find(args.find)
    write(Path(locate(MODEL)), args.target, skipped)
    print(f"without {','.join(map(str, skipped))}: {args.target}")


if __name__ == "__main__":
    main()
