"""The layouts of quantised linears: GPTQ, AWQ, FP8 and compressed-tensors.

GPTQ, as AutoGPTQ and GPTQModel write it: codes of one output in the bits of consecutive int32, along the inputs.
`qweight` `[inputs * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`, `scales` `[groups, out]`, and `g_idx`
`[inputs]`, the group of each input.

AWQ (AutoAWQ, version GEMM): 4-bit codes of eight outputs in an int32, interleaved. `qweight` `[inputs, out / 8]`,
`qzeros` `[groups, out / 8]`, `scales` `[groups, out]`.

FP8: e4m3 codes with a scale for the tensor, for each row, or for each block of rows and inputs. As DeepSeek-V3,
Qwen3-FP8 and transformers' `fp8` write it: `weight` and `weight_scale_inv` (`weight_scale` elsewhere), by which the
weight is multiplied in spite of its name. Scales of activations are not used: activations stay in bf16.

compressed-tensors: codes packed in int32 along the inputs, or bytes, or FP8. `weight_packed`
`[out, inputs * bits / 32]` with `weight_shape`, or `weight` `[out, inputs]`; `weight_scale` `[out, groups]`,
`weight_zero_point` or packed along the outputs; `weight_g_idx` `[inputs]`, each input's group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ....errors import UnsupportedModel
from .matrix import (
    HINT,
    Codes,
    QuantizedMatrix,
    Values,
    check_fits,
    check_order,
    levels_of,
    signed_codes,
    unpacked,
    with_zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

Stored = Mapping[str, Any]  # the files' `StoredWeight`s by name
Found = Iterator[tuple[str, QuantizedMatrix]]  # by the name of the linear
_ONE = {4: 0x11111111, 8: 0x01010101}  # 1 in each code of an int32
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the digit of an int32 in which each of eight outputs is stored


def _stems(stored: Stored, ending: str, dtype: str) -> list[str]:
    """Return the names before `ending` of the tensors that have a dtype."""
    found = [name for name, weight in stored.items() if name.endswith(ending)]
    return [name.removesuffix(ending) for name in found if getattr(stored[name], "dtype", "") == dtype]


def gptq(stored: Stored, symmetric: bool, less_one: bool, group: int | None) -> Found:
    """Yield the matrices of GPTQ, with 4 or 8 bits.

    Args:
        symmetric: whether the zero points are meant to be the codes' middle; the stored ones decide.
        less_one: whether zero points are stored less 1, as in the first version of the format.
        group: the inputs that share a scale; None: as many as the number of scales says.
    """
    for stem in _stems(stored, ".qweight", "I32"):
        packed, rows = stored[f"{stem}.qweight"].size
        groups, columns = stored[f"{stem}.qzeros"].size
        bits = 32 * columns / rows
        if bits not in _ONE:
            raise UnsupportedModel(f"GPTQ with {bits:g} bits is not supported: {stem}", HINT)
        inputs = int(32 * packed // bits)
        shared = -(-inputs // groups) if group is None or groups == 1 else group
        check_fits(f"{stem}.scales", stored, (-(-inputs // shared), rows))
        check_order(f"{stem}.g_idx", stored, inputs, shared)
        codes = Codes((rows, inputs), int(bits), shared, not symmetric)

        def values(stem: str = stem, bits: int = int(bits)) -> Values:
            packed, zeros, scales = (stored[f"{stem}.{name}"].read() for name in ("qweight", "qzeros", "scales"))
            # With a carry, as GPTQModel converts the first version of the format to the second.
            levels = levels_of(unpacked(zeros + (_ONE[bits] if less_one else 0), bits).T, bits)
            return with_zeros(signed_codes(unpacked(packed.T.contiguous(), bits), bits), scales.T, levels)

        yield stem, QuantizedMatrix(codes, values)


def awq(stored: Stored) -> Found:
    """Yield the matrices of AWQ, with 4 bits and zero points."""
    for stem in _stems(stored, ".qweight", "I32"):
        inputs, columns = stored[f"{stem}.qweight"].size
        groups = stored[f"{stem}.scales"].size[0]
        check_fits(f"{stem}.scales", stored, (groups, 8 * columns))
        check_fits(f"{stem}.qzeros", stored, (groups, columns))

        def values(stem: str = stem) -> Values:
            codes, zeros = (
                unpacked(stored[f"{stem}.{name}"].read(), 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).T
                for name in ("qweight", "qzeros")
            )
            return with_zeros(codes.contiguous(), stored[f"{stem}.scales"].read().T, levels_of(zeros, 4))

        yield stem, QuantizedMatrix(Codes((8 * columns, inputs), 4, inputs // groups, has_zeros=True), values)


def float8(stored: Stored, block: tuple[int, int]) -> Found:
    """Yield the matrices of FP8; `block` are the rows and inputs that share a scale, where scales are a matrix."""
    for stem in _stems(stored, ".weight", "F8_E4M3"):
        rows, inputs = size = stored[f"{stem}.weight"].size
        name = f"{stem}.weight_scale_inv"
        name = name if name in stored else f"{stem}.weight_scale"
        blocks = (-(-rows // block[0]), -(-inputs // block[1]))
        check_fits(name, stored, (), (1,), (1, 1), (rows,), (rows, 1), blocks)
        has_blocks = stored[name].size == blocks and blocks not in ((1, 1), (rows, 1))

        def values(stem: str = stem, name: str = name, rows: int = rows, has_blocks: bool = has_blocks) -> Values:
            scales = stored[name].read().float()
            if has_blocks:
                scales = scales.repeat_interleave(block[0], 0)[:rows]
            else:
                scales = scales.reshape(-1, 1).expand(rows, 1)
            return Values(stored[f"{stem}.weight"].read(), scales)

        yield stem, QuantizedMatrix(Codes(size, 8, block[1] if has_blocks else inputs, is_float=True), values)


def compressed_tensors(stored: Stored, block: tuple[int, int]) -> Found:
    """Yield the matrices of compressed-tensors: integers of 4 or 8 bits, and FP8."""
    yield from float8(stored, block)
    for stem in _stems(stored, ".weight_packed", "I32"):
        rows, inputs = stored[f"{stem}.weight_shape"].read().tolist()
        columns = stored[f"{stem}.weight_packed"].size[1]
        bits = next((bits for bits in (4, 8) if -(-inputs // (32 // bits)) == columns), None)
        if bits is None:
            each = 32 * columns / inputs
            raise UnsupportedModel(f"compressed-tensors with {each:g} bits is not supported: {stem}", HINT)
        yield stem, _integers(stored, stem, "weight_packed", (rows, inputs), bits)
    for stem in _stems(stored, ".weight", "I8"):
        yield stem, _integers(stored, stem, "weight", stored[f"{stem}.weight"].size, 8)


def _integers(stored: Stored, stem: str, kind: str, size: tuple[int, int], bits: int) -> QuantizedMatrix:
    """Return a matrix of integers, packed or as they are, after checking its scales and zero points."""
    rows, inputs = size
    scale_size = stored[f"{stem}.weight_scale"].size
    by_group = [(rows, scale_size[-1])] if inputs % scale_size[-1] == 0 else []
    check_fits(f"{stem}.weight_scale", stored, (1,), (1, 1), *by_group)
    group = inputs // scale_size[-1]
    check_order(f"{stem}.weight_g_idx", stored, inputs, group)
    zero_points = f"{stem}.weight_zero_point"
    if zero_points in stored:
        check_fits(zero_points, stored, scale_size, (-(-rows // (32 // bits)), scale_size[-1]))

    def values() -> Values:
        codes, scales = stored[f"{stem}.{kind}"].read(), stored[f"{stem}.weight_scale"].read()
        if kind == "weight_packed":
            codes = signed_codes(unpacked(codes, bits)[:, :inputs], bits)
        scales = scales.float().reshape(-1, inputs // group).expand(rows, -1)
        if zero_points not in stored:
            return Values(codes, scales)
        return with_zeros(codes, scales, _zeros(stored[zero_points].read(), rows, scales.shape[1], bits))

    return QuantizedMatrix(Codes(size, bits, group, zero_points in stored), values)


def _zeros(stored: Tensor, rows: int, groups: int, bits: int) -> Tensor:
    """Return zero points `[rows, groups]` in fp32, from int8 numbers or packed ones."""
    if stored.element_size() == 1:
        return stored.float().reshape(-1, groups)
    return levels_of(unpacked(stored.T, bits).T[:rows], bits)
