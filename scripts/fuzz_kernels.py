#!/usr/bin/env python3
"""Call the native kernel with random shapes: right results or an InvalidCall, and no byte written beside the outputs.

    python scripts/fuzz_kernels.py                       500 calls at each level that this processor has
    python scripts/fuzz_kernels.py --runs 3000 --seed 7  others, and more of them
    python scripts/fuzz_kernels.py --seed 7 --only 41    one of them again
    python scripts/fuzz_kernels.py --library PATH        another build, such as that of scripts/check_sanitizers.sh

Results are compared with fp64. Then each call is repeated with one of its tensors damaged: another dtype, size or
stride. Such a call must be refused, or give the same result. A digest of all results is printed for each level: two
builds that print the same one compute the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.architecture.dims import Dimensions, LinearAttention
from offload.architecture.kv_formats import GROUP
from offload.architecture.weight_formats import FORMATS
from offload.kernels.delta_rule import DeltaRule, run_delta_rule
from offload.kernels.native import LEVELS, Kernel, KernelUnavailable, find_kernel
from offload.kernels.native.calls import BlockCalls, merge_call, partial_count
from offload.kernels.native.checks import InvalidCall
from offload.kernels.native.kv_groups import Groups, dequantize_call, kv_format, quantize_call
from offload.kernels.native.layout import (
    keys_of,
    new_key_panels,
    pack_weight,
    values_of,
    write_blocks,
    write_key_panels,
)
from offload.kernels.native.library import BLOCK
from offload.kernels.native.panels import format_struct, pack_quantized, round_weight
from offload.kernels.quantized import QuantizedFormat, QuantizedTensor
from offload.loading.formats.quantization import quantize_by_torch
from offload.settings.kv_formats import KV_FORMATS

DTYPES = (torch.bfloat16, torch.float32)
OTHERS = (torch.float16, torch.float64, torch.int32, torch.int64, *DTYPES)
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 500, 511, 512, 513, 700, 1023, 1025)
GUARD = 64  # elements beside each output, which must stay as they are
WIDE = {
    "int4": QuantizedFormat("int4", 4, 128, False, False, tuple(range(-8, 8)), wide=True),
    "int4 with minima": QuantizedFormat("int4", 4, 64, False, True, tuple(range(-8, 8)), wide=True),
    "int8 with minima": QuantizedFormat("int8", 8, 32, False, True, tuple(range(-128, 128)), wide=True),
    "fp8": QuantizedFormat("fp8", 8, 128, False, False, (), wide=True),
}


class Wrong(Exception):
    """A result is not what it should be."""


class Case(NamedTuple):
    """A call: `run(tensors)` returns its results, which `judge` compares with what they should be."""

    tensors: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], list[Tensor]]
    judge: Callable[[list[Tensor]], None]


class Draw:
    """Random numbers and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self._generator).to(dtype)

    def codes(self, *size: int, most: int = 256) -> Tensor:
        return torch.randint(0, most, size, generator=self._generator, dtype=torch.int32).to(torch.uint8)

    def one(self, *choices):
        return self.random.choice(choices)

    def count(self, most: int) -> int:
        """Return a number up to `most`, small ones and borders of blocks more often."""
        return min(self.one(self.random.randint(1, most), self.random.randint(1, 5), self.one(*BORDERS)), most)


@contextmanager
def guarded() -> Iterator[Callable[..., Tensor]]:
    """Yield a function that allocates outputs full of NaN; raise Wrong if memory beside one was written to."""
    made: list[tuple[Tensor, Tensor]] = []

    def allocate(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(size).numel()
        memory = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype)
        inner = memory[GUARD : GUARD + count].fill_(float("nan")).view(size)
        made.append((memory, inner))
        return inner

    yield allocate
    for memory, inner in made:
        if not bool((memory[:GUARD] == 7).all() and (memory[GUARD + inner.numel() :] == 7).all()):
            raise Wrong("memory beside an output was written to")


def near(found: Tensor, expected: Tensor, limit: float, what: str = "result") -> None:
    """Raise Wrong if the relative norm of the difference is above the limit."""
    if found.shape != expected.shape:
        raise Wrong(f"{what}: {list(found.shape)}, not {list(expected.shape)}")
    error = (found.double() - expected.double()).norm().item()
    if expected.numel() and not error <= limit * expected.double().norm().item() + 1e-30:
        raise Wrong(f"{what}: an error of {error / expected.double().norm().item():.1e} where {limit:.0e} is allowed")


def equal(found: Tensor, expected: Tensor, what: str = "result") -> None:
    if not torch.equal(found, expected):
        raise Wrong(f"{what}: other bits")


def new_blocks(keys: Tensor, values: Tensor, spare: int = 0) -> Tensor:
    """Return blocks of keys and values `[kv_heads, keys, head_dim]`, with NaN behind them."""
    heads, count, dim = keys.shape
    blocks = torch.full((heads, -(-count // BLOCK) + spare, 2 * BLOCK * dim), float("nan"), dtype=keys.dtype)
    write_blocks(blocks, dim, torch.arange(count), keys, values)
    return blocks


def sight(seen: int, tokens: int, causal: bool, keys: int, parents: list[int] | None, window: int) -> Tensor:
    """Return which keys each token sees, `[tokens, keys]`."""
    mask = torch.zeros(tokens, keys, dtype=torch.bool)
    for token in range(tokens):
        visible = list(range(seen + token * causal))
        if parents is not None:
            path, node = [], len(parents) - tokens + token
            while node >= 0:
                path.append(seen - 1 + node)
                node = parents[node]
            visible = [*range(seen - 1), *reversed(path)]
        mask[token, visible[-window:] if window else visible] = True
    return mask


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp in fp64."""
    grouped = q.double().unflatten(1, (len(keys), -1))
    scores = torch.einsum("thgd,hkd->thgk", grouped, keys.double()) * q.shape[2] ** -0.5
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    out = torch.einsum("thgk,hkd->thgd", scores.softmax(-1), values.double())
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1)


def dimensions(heads: int, kv_heads: int, head_dim: int) -> Dimensions:
    return Dimensions(1, 64, heads, kv_heads, head_dim, 64, 64, True)


def attention_case(kernel: Kernel, draw: Draw) -> Case:
    """A chain or a tree, whole or by a table, with a window or quantised groups, merged by the kernel or the caller."""
    dtype, kv_heads, group = draw.one(*DTYPES), draw.random.randint(1, 3), draw.one(1, 2, 3, 7, 8)
    dim, tokens = BLOCK * draw.one(1, 2, 3, 4, 5, 6, 8, 16), draw.count(40)
    kind = draw.one("", "", "", "", "q4", "q8", "fp8")
    seen, causal = draw.count(1100) + (GROUP if kind else 0), draw.one(True, True, False)
    tree = causal and draw.one(True, False, False)
    nodes = tokens + draw.one(0, 0, draw.count(20)) if tree else 0
    parents = [draw.random.randint(max(i - draw.one(1, 2, i + 1), -1), i - 1) for i in range(nodes)] if tree else None
    window = draw.count(seen + 20) if not kind and draw.one(True, False, False) else 0
    keys = seen + (nodes - 1 if tree else (tokens - 1) * causal)
    q, k, v = (
        draw(tokens, kv_heads * group, dim, dtype=dtype),
        *(draw(kv_heads, keys, dim, dtype=dtype) for _ in "kv"),
    )
    if draw.one(True, False, False):
        q *= draw.one(1e-3, 5.0, 5.0 if kind else 300.0)  # digits of quantised products round large logits
    blocks, table, groups = new_blocks(k, v, draw.one(0, 0, 3)), None, None
    shape = dimensions(kv_heads * group, kv_heads, dim)
    if kind or draw.one(True, False):
        order = torch.stack([torch.randperm(blocks.shape[1]) for _ in range(kv_heads)])
        blocks = torch.empty_like(blocks).scatter_(1, order[:, :, None].expand_as(blocks), blocks)
        table = order.to(torch.int32)
    if kind:
        table = torch.arange(blocks.shape[1], dtype=torch.int32).repeat(kv_heads, 1)
        blocks = new_blocks(k, v, blocks.shape[1] + (-blocks.shape[1] % 2) - -(-keys // BLOCK))
        most = (seen - 1) // GROUP
        chosen = sorted(draw.random.sample(range(most), draw.random.randint(1, most)))
        memory = torch.zeros((kv_heads, blocks.shape[1] // 2, KV_FORMATS[kind].run_bytes(dim)), dtype=torch.uint8)
        groups = Groups(memory, kv_format(kind))
        items = torch.tensor([(h, 2 * g, g) for h in range(kv_heads) for g in chosen], dtype=torch.int32)
        kernel.quantize(quantize_call(blocks, groups, items, dim))
        both = [torch.empty(len(items), GROUP, dim) for _ in range(2)]
        kernel.quantize(dequantize_call(groups, items, *both))
        exact = [k, v]
        k, v = k.float(), v.float()
        for at, (head, _, number) in enumerate(items.tolist()):
            some = slice(number * GROUP, (number + 1) * GROUP)
            for x, original, dequantised in zip((k, v), exact, both, strict=True):
                # codes have 4 bits or 3 bits behind the point at least
                near(dequantised[at], original[head, some], 0.25 if kind == "q4" else 0.1, "dequantised numbers")
                x[head, some] = dequantised[at]
            table[head, 2 * number : 2 * number + 2] = ~table[head, 2 * number : 2 * number + 2]
            blocks[head, 2 * number : 2 * number + 2] = float("nan")
    calls = BlockCalls(shape, blocks.shape[1])
    tensors = {"q": q, "kv": blocks} | ({} if table is None else {"table": table})
    tensors |= {"parents": torch.tensor(parents, dtype=torch.int32)} if tree else {}
    narrow, by_parts = draw.one(True, False), draw.one(True, False)

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        more = {"table": x.get("table"), "parents": x.get("parents"), "groups": groups, "window": window}
        size = x["q"].shape
        with guarded() as new:
            out, lse = new(*size, dtype=dtype if narrow else torch.float32), new(*size[:2])
            if by_parts:
                count = partial_count(seen, tokens, causal, tensors.get("parents"))
                partials, into = new(count, *size[:2], 2 + size[2]), new(*size[:2], 2 + size[2])
                kernel.attend(calls.attention(x["kv"], x["q"], seen, causal, partials=partials, **more))
                into.zero_()[..., 0] = float("-inf")
                kernel.merge(merge_call(into, partials, out))
                return [out]
            kernel.attend(calls.attention(x["kv"], x["q"], seen, causal, out=out, lse=lse, **more))
            return [out, lse]

    def judge(found: list[Tensor]) -> None:
        expected = attend(q, k, v, sight(seen, tokens, causal, keys, parents, window))
        fine = dtype == torch.float32 and not (narrow and kind)
        near(found[0], expected[0], 1e-4 if fine else 8e-3, "attention")
        if len(found) > 1 and not torch.allclose(found[1].double(), expected[1], rtol=1e-4, atol=1e-2):
            raise Wrong("another log-sum-exp")

    return Case(tensors, run, judge)


def append_case(kernel: Kernel, draw: Draw) -> Case:
    """New tokens: queries are rotated, keys rotated and stored, values stored, and nothing else is changed."""
    dtype, kv_heads, group, dim = (
        draw.one(*DTYPES),
        draw.random.randint(1, 3),
        draw.one(0, 1, 3),
        BLOCK * draw.one(1, 4, 5),
    )
    start, tokens = draw.count(90) - 1, draw.count(40)
    stored = draw.one(0, 0, draw.random.randint(0, tokens))
    blocks = -(-(start + tokens) // BLOCK) + draw.one(0, 2)
    calls = BlockCalls(dimensions(kv_heads * max(group, 1), kv_heads, dim), blocks)
    every = draw(tokens, kv_heads * (group + 2), dim, dtype=dtype)
    q, k, v = every.split([kv_heads * group, kv_heads, kv_heads], 1)  # strides between tokens
    angles = draw(tokens, 1, dim // 2).repeat(1, 1, 2)
    before = draw(kv_heads, blocks, 2 * BLOCK * dim, dtype=dtype)
    tensors = {"q": q, "k": k, "v": v, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "kv": before}
    if draw.one(True, False):
        tensors["table"] = torch.randperm(blocks).to(torch.int32)

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        kv = x["kv"].clone(memory_format=torch.preserve_format)
        with guarded() as new:
            rotated = new(*q.shape, dtype=dtype)
            rows = (x["cos"], x["sin"])
            kernel.append(calls.append(kv, start, x["q"], x["k"], x["v"], rows, rotated, stored, x.get("table")))
        return [rotated, kv]

    def judge(found: list[Tensor]) -> None:
        cos, sin = tensors["cos"].double(), tensors["sin"].double()
        turned = [
            y * cos + torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1) * sin for y in (q.double(), k.double())
        ]
        limit = 1e-6 if dtype == torch.float32 else 4e-3
        near(found[0], turned[0], limit, "rotated queries")
        table = tensors.get("table", torch.arange(blocks))
        positions = torch.arange(start + stored, start + tokens)
        places = table[positions // BLOCK].long() * BLOCK + positions % BLOCK
        keys, values = (of(found[1], dim).flatten(1, 2) for of in (keys_of, values_of))
        near(keys[:, places].transpose(0, 1), turned[1][stored:], limit, "stored keys")
        equal(values[:, places].transpose(0, 1), v[stored:], "stored values")
        others = torch.ones(blocks * BLOCK, dtype=torch.bool)
        others[places] = False
        for ours, of in ((keys, keys_of), (values, values_of)):
            equal(ours[:, others], of(before, dim).flatten(1, 2)[:, others], "tokens beside them")

    return Case(tensors, run, judge)


def observe_case(kernel: Kernel, draw: Draw) -> Case:
    """The softmax weights that keys receive."""
    dtype, kv_heads, group, dim = (
        draw.one(*DTYPES),
        draw.random.randint(1, 2),
        draw.one(1, 3, 8),
        BLOCK * draw.one(1, 4, 5),
    )
    tokens, seen = draw.count(70), draw.count(700)
    keys = seen + tokens - 1
    q, k = draw(tokens, kv_heads * group, dim, dtype=dtype), draw(kv_heads, keys, dim, dtype=dtype)
    mask = sight(seen, tokens, True, keys, None, 0)
    blocks = new_blocks(k, k)
    calls = BlockCalls(dimensions(kv_heads * group, kv_heads, dim), blocks.shape[1])
    tensors = {"q": q, "kv": blocks, "lse": attend(q, k, k, mask)[1].float()}

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        with guarded() as new:
            received = new(kv_heads, keys).zero_()
            kernel.observe(calls.observation(x["kv"], x["q"], seen, x["lse"], received))
        return [received]

    def judge(found: list[Tensor]) -> None:
        scores = torch.einsum("thgd,hkd->thgk", q.double().unflatten(1, (kv_heads, -1)), k.double()) * dim**-0.5
        weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
        near(found[0], weights.sum((0, 2)), 1e-4, "sums of weights")

    return Case(tensors, run, judge)


def score_case(kernel: Kernel, draw: Draw) -> Case:
    """Products of a query and keys."""
    dtype, heads, dim, keys = draw.one(*DTYPES), draw.random.randint(1, 3), BLOCK * draw.one(1, 3, 8), draw.count(1100)
    query, k = draw(heads, dim, dtype=dtype), draw(heads, keys, dim, dtype=dtype)
    panels = new_key_panels(heads, keys + draw.one(0, 40), dim, dtype).zero_()
    write_key_panels(panels, 0, k)

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        with guarded() as new:
            scores = new(heads, keys)
            kernel.score_keys(x["query"], x["panels"], scores)
        return [scores]

    expected = torch.einsum("hd,hkd->hk", query.double(), k.double())
    return Case({"query": query, "panels": panels}, run, lambda found: near(found[0], expected, 1e-5, "scores"))


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


CASES = (attention_case, attention_case, append_case, observe_case, score_case, linear_case, quantised_case)
CASES += (quantised_case, rounding_case, norm_case, delta_case)


def damaged(x: Tensor, draw: Draw) -> tuple[str, Tensor]:
    """Return what was done to a tensor, and the tensor: with other strides, of another dtype or of another size."""
    how = draw.one("strides", "dtype", "shorter", "longer")
    if how == "strides":
        return how, x.repeat_interleave(2, dim=-1)[..., ::2]
    if how == "dtype":
        return how, x.to(draw.one(*(kind for kind in OTHERS if kind != x.dtype)))
    dim = draw.random.randrange(x.dim())
    if how == "shorter":
        return f"shorter by one in dimension {dim}", x.narrow(dim, 0, max(x.shape[dim] - 1, 0))
    return f"longer by one in dimension {dim}", torch.cat((x, x.narrow(dim, 0, 1)), dim)


def try_case(kernel: Kernel, seed: int, digest: object) -> tuple[str, bool]:
    """Run a random call, and the same with a damaged tensor. Returns its kind, and whether the latter was refused."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    make = draw.one(*CASES)
    case = make(kernel, draw)
    found = case.run(case.tensors)
    for x in found:
        digest.update(x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    case.judge(found)
    name = draw.one(*(name for name, x in case.tensors.items() if x.numel()))
    how, x = damaged(case.tensors[name], draw)
    try:
        again = case.run({**case.tensors, name: x})
    except InvalidCall:
        return make.__name__, True
    if how == "strides":
        for ours, theirs in zip(again, found, strict=True):
            equal(ours, theirs, f"{name} with other strides")
    elif how == "dtype":
        raise Wrong(f"{name} of {x.dtype} was not refused")
    return make.__name__, False


def refuse_odd_sizes(kernel: Kernel) -> None:
    """Check that heads, rows and inputs that the kernel does not support are refused."""
    x = torch.ones(3, 24)
    attempts = [lambda dim=dim: BlockCalls(dimensions(1, 1, dim), 1) for dim in (0, 1, 8, 17, 24, 528)]
    attempts.append(lambda: kernel.norm(x, torch.ones(24), 1e-5, torch.empty(3, 24)))
    attempts.append(lambda: kernel.gate(x, torch.empty(3, 12)))
    attempts.append(lambda: kernel.linear(x[:, :3].contiguous(), torch.ones(1, 3, 16), None, None, torch.empty(3, 4)))
    attempts.append(lambda: merge_call(torch.zeros(1, 1, 10)))
    for attempt in attempts:
        try:
            attempt()
        except InvalidCall:
            continue
        raise Wrong("a size that the kernel does not support was not refused")


def fuzz(kernel: Kernel, seeds: range) -> int:
    """Run random calls, print what they were and a digest; return how many were wrong."""
    kinds, refused, wrong, digest = Counter(), 0, 0, hashlib.sha256()
    refuse_odd_sizes(kernel)
    for seed in seeds:
        try:
            kind, was_refused = try_case(kernel, seed, digest)
            kinds[kind.removesuffix("_case")] += 1
            refused += was_refused
        except Exception as error:  # of any kind: each is a failure of the call
            wrong += 1
            print(f"{kernel.level}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{kernel.level}: {told}; {refused} damaged calls refused, {wrong} wrong; digest {digest.hexdigest()[:16]}")
    return wrong


def main() -> int:
    """Fuzz all levels; return 1 if a call was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the only call to make")
    parser.add_argument("--library", type=Path, help="another build of the kernel")
    parser.add_argument("--level", choices=LEVELS, help="the only level")
    args = parser.parse_args()
    first = args.seed * 1_000_000
    seeds = range(first, first + args.runs) if args.only is None else range(first + args.only, first + args.only + 1)
    wrong = tried = 0
    for level in (args.level,) if args.level else LEVELS:
        try:
            kernel = find_kernel(level, args.library)
        except KernelUnavailable as error:
            print(f"{level}: {error}")
            continue
        tried += 1
        wrong += fuzz(kernel, seeds)
    return int(wrong > 0 or not tried)


if __name__ == "__main__":
    sys.exit(main())
