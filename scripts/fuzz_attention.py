"""Random calls of the native kernel that store keys and values, and attend to them or score them."""

from __future__ import annotations

import torch
from fuzz_draws import DTYPES, Case, Draw, Wrong, equal, guarded, near
from torch import Tensor

from offload.architecture.dims import Dimensions
from offload.architecture.kv_formats import GROUP
from offload.kernels.native import Kernel
from offload.kernels.native.calls import BlockCalls, merge_call, partial_count
from offload.kernels.native.kv_groups import Groups, dequantize_call, kv_format, quantize_call
from offload.kernels.native.layout import (
    keys_of,
    new_key_panels,
    values_of,
    write_blocks,
    write_key_panels,
)
from offload.kernels.native.structs import BLOCK
from offload.settings.kv_formats import KV_FORMATS


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
