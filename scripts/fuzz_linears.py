"""Random calls of the native kernel that multiply, round, normalise, or run the delta rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz_draws import DTYPES, Case, Draw, Wrong, equal, guarded, near
from torch import Tensor

from offload.architecture.dims import LinearAttention
from offload.architecture.weight_formats import FORMATS
from offload.kernels.delta_rule import DeltaRule, run_delta_rule
from offload.kernels.native import Kernel
from offload.kernels.native.checks import InvalidCall
from offload.kernels.native.layout import (
    pack_weight,
)
from offload.kernels.native.panels import format_struct, pack_quantized, round_weight
from offload.kernels.native.structs import BLOCK
from offload.kernels.quantized import QuantizedFormat, QuantizedTensor
from offload.loading.formats.quantization import quantize_by_torch

WIDE = {
    "int4": QuantizedFormat("int4", 4, 128, False, False, tuple(range(-8, 8)), wide=True),
    "int4 with minima": QuantizedFormat("int4", 4, 64, False, True, tuple(range(-8, 8)), wide=True),
    "int8 with minima": QuantizedFormat("int8", 8, 32, False, True, tuple(range(-128, 128)), wide=True),
    "fp8": QuantizedFormat("fp8", 8, 128, False, False, (), wide=True),
}


def linear_case(kernel: Kernel, draw: Draw) -> Case:
    """A product with plain weights."""
    dtype, rows, outputs = draw.one(*DTYPES), draw.count(130), draw.count(90)
    inputs = 2 * draw.one(1, 7, 8, draw.random.randint(1, 600))
    weight = draw(outputs, inputs, dtype=dtype)
    return _product(kernel, draw, draw(rows, inputs, dtype=dtype), pack_weight(weight), weight.double(), None)


def quantised_case(kernel: Kernel, draw: Draw) -> Case:
    """A product with quantised weights, and their rows."""
    kind = draw.one(*FORMATS.values(), *WIDE.values())
    rows, outputs, inputs = draw.count(110), draw.count(70), kind.block * draw.random.randint(1, 6)
    weight = _random_weight(kind, outputs, inputs, draw)
    packed, format = pack_quantized(kernel, [weight]), format_struct(kind)
    case = _product(
        kernel, draw, draw(rows, inputs, dtype=torch.bfloat16), packed, weight.dequantized().double(), format
    )
    ids = torch.tensor([draw.random.randrange(outputs) for _ in range(draw.count(20))])

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        with guarded() as new:
            some = kernel.unpack(x["weight"], format, x["ids"], new(len(ids), inputs))
        return [*case.run(x), some]

    def judge(found: list[Tensor]) -> None:
        case.judge(found[:-1])
        near(found[-1], weight.dequantized()[ids], 1e-6, "dequantised rows")

    return Case({**case.tensors, "ids": ids}, run, judge)


def _random_weight(kind: QuantizedFormat, rows: int, inputs: int, draw: Draw) -> QuantizedTensor:
    codes = draw.codes(rows, inputs // 32, 32, most=2**kind.bits)
    if kind.is_float:
        codes = torch.where(codes & 127 == 127, 3, codes).view(torch.float8_e4m3fn)  # no NaN
    elif kind.bits == 8:
        codes = codes.view(torch.int8)

    def numbers(group: int) -> Tensor:
        if kind.nested:
            return draw.codes(rows, inputs // group, most=64).to(torch.int8) - 32
        return draw(rows, inputs // group, dtype=torch.float32 if kind.wide else torch.float16)

    def factors() -> Tensor:
        return draw(rows, inputs // kind.block, dtype=torch.float16)

    minima = numbers(kind.minimum_group) if kind.has_minimum else None
    outer = factors() if kind.nested else None
    return QuantizedTensor(
        kind, codes, numbers(kind.group), minima, outer, factors() if kind.nested and kind.has_minimum else None
    )


def _product(kernel: Kernel, draw: Draw, x: Tensor, packed: Tensor, weight: Tensor, format: object) -> Case:
    rows, outputs, dtype, spare = len(x), len(weight), x.dtype, draw.one(0, 0, 5)
    wide = draw.one(True, False)
    tensors = {"x": x, "weight": packed}
    tensors |= {"bias": draw(outputs)} if draw.one(True, False) else {}
    tensors |= {"onto": draw(rows, outputs + spare, dtype=dtype)[:, :outputs]} if draw.one(True, False) else {}

    def run(t: dict[str, Tensor]) -> list[Tensor]:
        with guarded() as new:
            whole = new(rows, outputs + spare, dtype=torch.float32 if wide else dtype)
            y = whole[:, :outputs]
            kernel.linear(t["x"], t["weight"], t.get("bias"), t.get("onto"), y, format)
            if not whole[:, outputs:].isnan().all():
                raise Wrong("columns beside the outputs were written to")
        return [y]

    def judge(found: list[Tensor]) -> None:
        expected = x.double() @ weight.T
        for name in ("bias", "onto"):
            expected = expected + (tensors[name].double() if name in tensors else 0)
        near(found[0], expected, 3e-5 if wide or dtype == torch.float32 else 4e-3, "product")

    return Case(tensors, run, judge)


def rounding_case(kernel: Kernel, draw: Draw) -> Case:
    """Weights rounded to fewer bits: in the bits of torch's operations."""
    kind = FORMATS[draw.one("Q4_1", "Q5_1", "Q6_K", "Q8_0")]
    weight = draw(draw.count(20), kind.block * draw.random.randint(1, 5), dtype=draw.one(*DTYPES))
    if draw.one(True, False):
        weight[draw.random.randrange(len(weight))] = 0

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        if x["weight"].dtype != weight.dtype:
            raise InvalidCall("other dtypes are converted, and their results are others")
        found = round_weight(kernel, x["weight"], kind)
        return [y.float() for y in (found.codes, found.scales, found.minima, found.factors) if y is not None]

    def judge(found: list[Tensor]) -> None:
        wanted = quantize_by_torch(weight, kind)
        parts = [y.float() for y in (wanted.codes, wanted.scales, wanted.minima, wanted.factors) if y is not None]
        for ours, theirs in zip(found, parts, strict=True):
            equal(ours, theirs, f"rounding to {kind.name}")

    return Case({"weight": weight}, run, judge)


def norm_case(kernel: Kernel, draw: Draw) -> Case:
    """RMSNorm of rows, or of some heads of each token, and the gate."""
    dtype, width, rows, heads = draw.one(*DTYPES), BLOCK * draw.random.randint(1, 40), draw.count(80), draw.one(0, 1, 3)
    x = draw(rows, 2 + heads, width, dtype=dtype)[:, :heads] if heads else draw(rows, width, dtype=dtype)
    tensors = {"x": x, "weight": draw(width, dtype=dtype), "gate": draw(rows, 2 * width, dtype=dtype)}

    def run(t: dict[str, Tensor]) -> list[Tensor]:
        with guarded() as new:
            normed = kernel.norm(t["x"], t["weight"], 1e-5, new(*x.shape, dtype=dtype))
            gated = kernel.gate(t["gate"], new(rows, width, dtype=dtype))
        return [normed, gated]

    def judge(found: list[Tensor]) -> None:
        exact, limit = x.double(), 1e-6 if dtype == torch.float32 else 4e-3
        scale = (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        near(found[0], exact * scale * tensors["weight"].double(), limit, "norm")
        gate, up = tensors["gate"].double().chunk(2, -1)
        near(found[1], F.silu(gate) * up, limit, "gate")

    return Case(tensors, run, judge)


def delta_case(kernel: Kernel, draw: Draw) -> Case:
    """Linear attention by the gated delta rule."""
    keys, tokens = draw.random.randint(1, 3), draw.count(40)
    sizes = LinearAttention(
        keys, keys * draw.one(1, 2), BLOCK * draw.one(1, 2, 4), BLOCK * draw.one(1, 3), draw.one(1, 4), 1
    )
    values, dtype = sizes.value_heads, draw.one(*DTYPES)
    tensors = {"rows": draw(sizes.kernel - 1 + tokens, sizes.width, dtype=dtype), "gates": draw(tokens, 2 * values)}
    tensors |= {"conv": draw(sizes.kernel, sizes.width), "decay": -draw(values).abs(), "bias": draw(values)}
    tensors["state"] = draw(values, sizes.key_dim, sizes.value_dim)

    def run(t: dict[str, Tensor]) -> list[Tensor]:
        state, rule = (
            t["state"].clone(memory_format=torch.preserve_format),
            DeltaRule(sizes, t["conv"], t["decay"], t["bias"]),
        )
        with guarded() as new:
            out = kernel.delta(rule, t["rows"], t["gates"], state, new(tokens, values, sizes.value_dim))
        return [out, state]

    def judge(found: list[Tensor]) -> None:
        exact = {name: x.double() for name, x in tensors.items()}
        rule = DeltaRule(sizes, exact["conv"], exact["decay"], exact["bias"])
        rows, state = exact["rows"].split([sizes.kernel - 1, tokens]), exact["state"].clone()
        near(found[0], run_delta_rule(rule, *rows, exact["gates"], state), 1e-4, "outputs")
        near(found[1], state, 1e-4, "state")

    return Case(tensors, run, judge)
