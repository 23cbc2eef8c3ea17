"""Validates the metadata of a GGUF file before any other reader trusts it; refuses variants. Imports no torch.

The gguf package trusts every length in a file and decodes strings only when they are read. A damaged length makes it
loop without end, and a damaged string raises wherever it happens to be read, in transformers too. A variant is a file
that the decoder would compute as the plain model, and wrongly.
"""

import mmap
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from struct import Struct, error
from typing import Any

from ...architecture.families import Family
from ...errors import CheckpointError, UnsupportedModel
from ...short_repr import short_repr, short_text

_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value by type


class _Damage(ValueError):
    """A damaged header; the message does not name the file."""


class _Cursor:
    """A read position in the mapped file. Raises `_Damage` instead of reading beyond the end."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._at = 4  # after the magic number
        order = "<" if data[4:6] != b"\0\0" else ">"  # byte order, from the version number, which is small
        self._u32, self._u64 = Struct(f"{order}I"), Struct(f"{order}Q")

    def u32(self) -> int:
        return self._number(self._u32)

    def u64(self) -> int:
        return self._number(self._u64)

    def _number(self, kind: Struct) -> int:
        (value,) = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return value

    def skip(self, count: int, what: str) -> None:
        if count > len(self._data) - self._at:
            raise _Damage(f"{what} ends beyond the file")
        self._at += count

    def string(self, what: str) -> str:
        length, start = self.u64(), self._at
        self.skip(length, what)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise _Damage(f"{what} is not UTF-8: {short_repr(self._data[start : self._at])}") from None

    def value(self, kind: int, what: str) -> None:
        if kind == _STRING:
            self.string(what)
        elif kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind], what)
        elif kind == _ARRAY:
            self._array(what)
        else:
            raise _Damage(f"{what} has the unknown type {kind}")

    def _array(self, what: str) -> None:
        kind, length = self.u32(), self.u64()
        if kind in _SCALAR_BYTES:
            self.skip(length * _SCALAR_BYTES[kind], what)
        elif kind == _STRING:
            for index in range(length):
                self.string(f"{what}[{index}]")
        else:  # the format allows arrays of arrays, but no model has one
            raise _Damage(f"{what} is an array of the type {kind}")


def check_metadata(path: Path) -> None:
    """Check that every key and value lies within the file and that every string is UTF-8.

    Raises CheckpointError, which names the key, and UnsupportedModel for another version of the format.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise _Damage("it does not begin with GGUF")
            cursor = _Cursor(data)
            version = cursor.u32()
            if not 0 < version < 100:
                raise _Damage(f"its version is {version:,}")
            if version not in (2, 3):
                raise UnsupportedModel(f"{path} is GGUF of version {version}", "convert the model again; 2 and 3 run")
            cursor.skip(8, "the header")  # the number of tensors
            for index in range(cursor.u64()):
                key = cursor.string(f"the name of metadata key {index}")
                cursor.value(cursor.u32(), short_text(key))
    except (OSError, ValueError, error) as damage:  # an empty file cannot be mapped; struct.error means the file ended
        reason = str(damage) if isinstance(damage, (_Damage, OSError)) else "it is truncated"
        raise CheckpointError(f"{path} is corrupt: {reason}", "fetch the model again") from damage


_ONLY = "what runs: models with the same heads in every layer and RoPE on whole heads"
_SAFETENSORS = "use the model's safetensors"
_LONGROPE = "rope_factors_long.weight"
_ZERO = {  # keys that are absent or zero in what runs -> what others have
    "expert_count": ("mixtures of experts of this architecture", _ONLY),
    "expert_shared_count": ("experts that all tokens share", _ONLY),
    "expert_group_count": ("groups of experts", _ONLY),
    "attention.sliding_window": ("sliding windows", "use a model of this architecture without them"),
    "rope.dimension_sections": ("RoPE on several axes, as in models that read images,", _ONLY),
    "nextn_predict_layers": ("layers that predict further tokens", _ONLY),
}


def refuse_variants(
    family: Family, read: Callable[[str], Any], values: Mapping[str, Any], tensors: Container[str]
) -> None:
    """Raise UnsupportedModel for variants that the decoder does not compute.

    `read` returns the value of a key behind the architecture's name, None for an absent one; `values` are those under
    transformers' names, and `tensors` the file's names.
    """
    if isinstance(values["num_attention_heads"], list) or isinstance(values.get("num_key_value_heads"), list):
        raise UnsupportedModel("GGUF models whose layers differ in their heads are not supported", _ONLY)
    for key, (what, hint) in _ZERO.items():
        if key not in family.gguf.keys.values() and not _is_zero(value := read(key)):
            raise UnsupportedModel(f"{what} are not supported ({key} is {short_repr(value)})", hint)
    for key in family.gguf.switches:
        if read(key) is False:
            raise UnsupportedModel(f"{family.name} with {key} false is not supported", _SAFETENSORS)
    if _LONGROPE in tensors:
        raise UnsupportedModel("GGUF models with longrope are not supported", _SAFETENSORS)


def refuse_unused(names: Iterable[str]) -> None:
    """Raise UnsupportedModel for tensors of layers that the decoder would leave out."""
    if name := next(iter(names), None):
        raise UnsupportedModel(
            f"GGUF models with the tensor {short_text(name)} are not supported", f"{_ONLY}; or {_SAFETENSORS}"
        )


def _is_zero(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else not value
