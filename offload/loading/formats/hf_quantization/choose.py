"""Chooses the layout that a config's `quantization_config` names, and reads its linears. Imports no torch."""

import json
from collections.abc import Mapping
from typing import Any

from ....errors import CheckpointError, UnsupportedModel
from ....short_repr import short_text
from .layouts import AWQLayout, CompressedTensorsLayout, Float8Layout, GPTQLayout
from .stored import Header, Headers, Layout, ReadSmall, StoredMatrix

_HINT = (
    "what runs: fp8 (e4m3), gptq and awq in 4 bits, gptq in 8, compressed-tensors in int4, int8 and fp8; "
    "or use the unquantised model, or a GGUF file of it"
)
_FORMATS = (None, "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """Return the layout of the quantised linears of a config.json; None if it names none. Raises UnsupportedModel.

    MXFP4 is none: only experts are, which stacked_experts.py reads.
    """
    settings = _settings(config)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method == "mxfp4":
        return None
    if method not in _CHOICES:
        raise _refusal(str(method))
    return _CHOICES[method](settings)


def quantization_text(config: Mapping[str, Any]) -> str:
    """Return the settings of a config.json that decide how its quantised weights are read."""
    return json.dumps(_settings(config), sort_keys=True)


def _settings(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _refusal(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"this checkpoint is quantised ({short_text(what)}), in a way that is not supported", _HINT)


def _gptq(settings: Mapping[str, Any]) -> GPTQLayout:
    """Choose the version of GPTQ. Layouts for one kernel, such as marlin, have their own names."""
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise _refusal(f"gptq, packed as {version}")
    group = settings.get("group_size")
    group = group if isinstance(group, int) and group > 0 else None  # -1: one group of all inputs
    return GPTQLayout(symmetric=settings.get("sym", True) is True, less_one=version == "gptq", group=group)


def _awq(settings: Mapping[str, Any]) -> AWQLayout:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refusal(f"awq, packed as {version}")
    return AWQLayout()


def _float8(settings: Mapping[str, Any]) -> Float8Layout:
    return _in_blocks(settings.get("weight_block_size"))


def _compressed_tensors(settings: Mapping[str, Any]) -> CompressedTensorsLayout:
    groups = list((settings.get("config_groups") or {}).values())
    sparsity = settings.get("sparsity_config") or {}
    formats = [each.get("format") for each in (settings, *groups, sparsity)]
    if wrong := [each for each in formats if each not in _FORMATS]:
        raise _refusal(f"compressed-tensors, {wrong[0]}")
    if settings.get("quantization_status", "compressed") != "compressed" or settings.get("transform_config"):
        raise _refusal("compressed-tensors that are not compressed, or transformed")
    blocks = [(each.get("weights") or {}).get("block_structure") for each in groups]
    return CompressedTensorsLayout(_in_blocks(next((block for block in blocks if block is not None), None)))


def _in_blocks(block: Any) -> Float8Layout:
    """Return the layout of FP8 in blocks of so many rows and inputs. Raises UnsupportedModel."""
    if block is None:
        return Float8Layout()
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise _refusal(f"fp8 in blocks of {block}")
    return Float8Layout((block[0], block[1]))


_CHOICES = {"gptq": _gptq, "awq": _awq, "fp8": _float8, "compressed-tensors": _compressed_tensors}


class QuantizedReader:
    """A `TensorReader` whose linears are quantised."""

    def __init__(self, read: Any, layout: Layout, matrices: Mapping[str, StoredMatrix]) -> None:
        self._read, self._layout, self._matrices = read, layout, matrices

    def __call__(self, name: str, part: tuple[slice, ...] | None = None) -> Any:
        """Return a tensor; quantised ones are dequantised to fp32, as a whole, and then sliced."""
        if name not in self._matrices:
            return self._read(name, part)
        from .codes import dequantized

        matrix = self._matrices[name]
        return dequantized(matrix, self._layout.read(matrix, self._read))[part or ...]

    def quantized(self, name: str) -> Any:
        """Return a `QuantizedTensor`, or None for a tensor that is plain or has to be dequantised."""
        if name not in self._matrices:
            return None
        from .codes import quantized

        matrix = self._matrices[name]
        return quantized(matrix, self._layout.read(matrix, self._read))


class StoredMatrices:
    """The quantised weights of a checkpoint, by transformers' names of the plain ones.

    Raises CheckpointError, UnsupportedModel.
    """

    def __init__(self, layout: Layout, headers: Headers, read: ReadSmall) -> None:
        self._layout = layout
        try:
            self._matrices = {f"{each.stem}.weight": each for each in layout.matrices(headers, read)}
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            what = f"quantised weights are damaged, or not as their config says: {short_text(str(error))}"
            raise CheckpointError(what, "fetch the model again") from error

    def __bool__(self) -> bool:
        return bool(self._matrices)

    def plain(self, headers: Headers) -> dict[str, Header]:
        """Return the headers without those of the quantised weights' tensors."""
        stems = {each.stem for each in self._matrices.values()}
        return {
            name: x for name, x in headers.items() if name.endswith(".bias") or name.rpartition(".")[0] not in stems
        }

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: each.size for name, each in self._matrices.items()}

    def bits(self) -> dict[str, float]:
        """Return the bits of a weight of those that stay quantised."""
        kinds = {name: each.format(each.has_zeros) for name, each in self._matrices.items()}
        return {name: kind.bits_per_weight for name, kind in kinds.items() if kind is not None}

    def reader(self, read: Any) -> QuantizedReader:
        """Return a `TensorReader` over the one of the files."""
        return QuantizedReader(read, self._layout, self._matrices)
