"""Seeded damage to a checkpoint's files: malformed configs, headers and metadata."""

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

VALUES = [
    *(0, -1, 1, 2, 3, 7, 63, 1000, 10**7, 2**31, 2**32 - 1, 2**63, 10**30, -(10**30), 10**400),
    *(0.0, -0.5, 0.5, 1e-320, 1e30, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "abc", "1e5", "32", "\x00", None, True, False, [], [1], [0.0], [[[]]], ["a"], {}, {"a": {"a": 1}}),
]
KEYS = [  # added if missing; some cost transformers memory, or change the meaning of others
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "num_labels", "id2label"),
    *("quantization_config", "per_layer_config", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("head_dim", "attention_bias", "mlp_bias", "factor", "rope_type", "type", "short_factor", "attn_implementation"),
]


def mutated_json(text: str, seed: int) -> bytes:
    """Return a JSON object with up to three values changed, or with damaged text."""
    draw = random.Random(seed)
    if draw.random() < 0.15:
        return damaged(text.encode(), draw)
    values = json.loads(text)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _change(values, draw)
    text = json.dumps(values)
    if draw.random() < 0.1:  # a key twice
        name = draw.choice(list(values) or ["a"])
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(draw.choice(VALUES))}" + "}"
    return text.encode()


def _change(values: dict, draw: random.Random) -> None:
    inner = [value for value in values.values() if isinstance(value, dict) and value]
    target = draw.choice(inner) if inner and draw.random() < 0.4 else values
    name = draw.choice(list(target)) if target and draw.random() < 0.8 else draw.choice(KEYS)
    kind = draw.random()
    if kind < 0.15:
        target.pop(name, None)
    elif kind < 0.25:
        target[name] = [target.get(name)]
    elif kind < 0.35 and isinstance(target.get(name), int | float):
        target[name] = target[name] * draw.choice([2, 0.5, -1, 3, 1e6])
    else:
        target[name] = draw.choice(VALUES)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the data with bytes flipped, overwritten, removed, repeated or cut off."""
    data = bytearray(data)
    at = draw.randrange(len(data))
    kind = draw.randrange(5)
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[at] = draw.choice([0, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    elif kind == 2:
        del data[at : at + draw.randrange(1, 9)]
    elif kind == 3:
        data[at:at] = data[at : at + draw.randrange(1, 9)]
    else:
        del data[at:]
    return bytes(data)


def mutated_nested_json(text: str, seed: int) -> bytes:
    """Return JSON with up to two values at any depth changed, more often near the top, or with damaged text."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return damaged(text.encode(), draw)
    whole = json.loads(text)
    for _ in range(draw.choice([1, 1, 2])):
        places = list(_places(whole))
        values, key = draw.choice(places[:60] if draw.random() < 0.5 else places)
        if isinstance(values, dict) and draw.random() < 0.2:
            values.pop(key)
        else:
            values[key] = draw.choice([*VALUES, [values[key]]])
    return json.dumps(whole).encode()


def _places(values: dict | list) -> Iterator[tuple[dict | list, str | int]]:
    """Yield each place of a value, those near the top first."""
    keys = list(values) if isinstance(values, dict) else range(min(len(values), 20))
    yield from ((values, key) for key in keys)
    for key in keys:
        if isinstance(values[key], dict | list):
            yield from _places(values[key])


def mutated_safetensors(data: bytes, seed: int) -> bytes:
    """Return a safetensors file with another header length, damaged header bytes, or changed header entries."""
    draw = random.Random(seed)
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = draw.randrange(5)
    if kind == 4:  # duplicate keys, deep nesting, what is no JSON
        entries = header.strip().decode()[1:]
        odd = [
            "a" * 10**6,
            "[" * 10**5 + "]" * 10**5,
            "NaN",
            entries.partition("}")[0] + "}",
            '{"shape": [-1]}',
            "null",
        ]
        header = ('{"a": ' + draw.choice(odd) + ", " + entries).encode()
        if draw.random() < 0.3:
            header = b"{" + entries[:-1].encode() + b"," + entries.encode()
        return struct.pack("<Q", len(header)) + header + rest
    if kind == 0:
        wrong = draw.choice([0, 1, length - 1, length + 1, length * 2, len(data), 2**31, 2**63, 2**64 - 1])
        return struct.pack("<Q", wrong) + header + rest
    if kind == 1:
        header = damaged(header, draw)
        return struct.pack("<Q", draw.choice([length, len(header)])) + header + rest
    if kind == 2:
        return (data[:8] + header + rest)[: draw.randrange(len(data))]
    entries = json.loads(header)
    name = draw.choice(list(entries))
    part = draw.choice(["dtype", "shape", "data_offsets", "name"])
    if part == "name":
        entries[draw.choice(["", "x", "a.b.c.d.e", name + ".weight"])] = entries.pop(name)
    elif isinstance(entries[name], dict):
        other = draw.choice([entry for entry in entries.values() if isinstance(entry, dict)])
        odd = [*VALUES, "I32", "F16", "BF16", "I8", [2**63, 0], [0, 2**62], [-1, 64], other.get(part)]
        entries[name][part] = draw.choice(odd)
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + rest


def mutated_gguf(data: bytes, metadata: int, seed: int) -> bytes:
    """Return a GGUF file with damage in its first `metadata` bytes: lengths, types, strings and tensor records."""
    draw = random.Random(seed)
    if draw.random() < 0.3:
        return damaged(data[:metadata], draw) + data[metadata:]
    at = draw.randrange(metadata - 8)
    wrong = draw.choice(
        [
            struct.pack("<I", draw.choice([0, 1, 7, 8, 9, 12, 13, 2**31, 2**32 - 1])),
            struct.pack("<Q", draw.choice([0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])),
            struct.pack("<f", draw.choice([0.0, -1.0, 1e-40, 1e38, float("nan"), float("inf")])),
            bytes([draw.randrange(256)]),
            bytes([data[at] ^ (1 << draw.randrange(8))]),
        ]
    )
    return data[:at] + wrong + data[at + len(wrong) :]


def mutated_field(data: bytes, offsets: dict[str, tuple[int, int]], seed: int) -> bytes:
    """Return a GGUF file with one metadata number changed; `offsets` has the offset and type of each."""
    draw = random.Random(seed)
    name = draw.choice(list(offsets))
    at, kind = offsets[name]
    letter = {4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}[kind]
    fitting = []
    for value in [*VALUES, 10000, 64, 96, 5]:
        try:
            fitting.append(struct.pack(f"<{letter}", value))
        except (struct.error, OverflowError):
            continue
    wrong = draw.choice(fitting)
    return data[:at] + wrong + data[at + len(wrong) :]


def number_offsets(path: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """Return offset and type of each number in a GGUF file's metadata, and the offset of its tensor data."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    offsets = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and int(field.types[0]) in (4, 5, 6, 10, 11, 12):
            offsets[name] = (field.offset + sum(part.nbytes for part in field.parts[:-1]), int(field.types[0]))
    return offsets, reader.data_offset
