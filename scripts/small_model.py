#!/usr/bin/env python3
"""Write the first layers of a model as a model of its own: small enough to travel, with its tokenizer and template.

    python scripts/small_model.py ~/.cache/triforce/models/smollm2-135m 12 small/
    python scripts/small_model.py Llama-3.2-1B-Q4_K_M.gguf 2 two-layers.gguf

Takes a GGUF file, a folder with one, or a folder with config.json and safetensors; weights keep their formats. The
text that such a model writes has no meaning, but every method must agree on it: for tests and bug reports.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

_LAYER = re.compile(r"(?:^|\.)(?:blk|layers)\.(\d+)\.")


def main() -> int:
    """Write the model that the command line names; return 2 if it has no such layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file, or the folder of a model")
    parser.add_argument("layers", type=int, help="how many layers to keep")
    parser.add_argument("output", type=Path, help="the GGUF file, or the folder, to write")
    args = parser.parse_args()
    try:
        write_small_model(args.model, args.layers, args.output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write_small_model(model: Path, layers: int, output: Path) -> None:
    """Write the first `layers` layers of `model` to `output`. Raises ValueError if it has fewer, OSError."""
    if model.is_file():
        write_gguf(model, layers, output)
        return
    output.mkdir(parents=True)
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        target = output / path.name
        if path.suffix == ".gguf":
            write_gguf(path, layers, target)
        elif path.suffix == ".safetensors":
            _write_safetensors(path, layers, target)
        elif path.name == "config.json":
            config = first_layers(json.loads(path.read_text("utf-8")), layers)
            target.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        elif not path.name.endswith(".index.json"):
            shutil.copyfile(path, target)
    _write_index(output)


def first_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a config.json for `layers` layers: the number, and every list with an entry for each layer."""
    config = {key: first_layers(value, layers) if key == "text_config" else value for key, value in config.items()}
    count = config.get("num_hidden_layers")
    if count is None:
        return config
    _check_layers(layers, count)
    kept = {key: v[:layers] if isinstance(v, list) and len(v) == count else v for key, v in config.items()}
    return kept | {"num_hidden_layers": layers}


def write_gguf(path: Path, layers: int, output: Path) -> None:
    """Write a GGUF file with the first layers of another one, its metadata otherwise unchanged."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    count_key = f"{architecture}.block_count"
    count = 1 + max((int(layer[1]) for tensor in reader.tensors if (layer := _LAYER.search(tensor.name))), default=-1)
    _check_layers(layers, count)
    writer = GGUFWriter(output, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value, kind = field.contents(), field.types[0]
        if name == count_key:
            value = layers
        elif kind == GGUFValueType.ARRAY and name.startswith(f"{architecture}.") and len(value) == count:
            value = value[:layers]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if _is_kept(tensor.name, layers):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_safetensors(path: Path, layers: int, output: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if _is_kept(name, layers)}  # noqa: SIM118
        metadata = file.metadata()
    if kept:
        save_file(kept, output, metadata)


def _write_index(folder: Path) -> None:
    """Write the index of a model in several safetensors files."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if len(files) < 2:
        for path in files:
            path.rename(folder / "model.safetensors")
        return
    names = {}
    for path in files:
        with safe_open(path, "pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")


def _is_kept(name: str, layers: int) -> bool:
    layer = _LAYER.search(name)
    return layer is None or int(layer[1]) < layers


def _check_layers(layers: int, count: int) -> None:
    if not 0 < layers <= count:
        raise ValueError(f"cannot keep {layers} layers of {count}")


if __name__ == "__main__":
    sys.exit(main())
