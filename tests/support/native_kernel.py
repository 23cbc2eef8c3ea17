"""Helpers of the native kernel's tests: an emulated build, blocks filled by torch, and attention in fp64."""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kernels.native.calls import partial_count
from offload.kernels.native.ops import NativeLinear, NativeOperations, Panels
from offload.kernels.native.packed_kv import RUN_BLOCKS, pack_call
from offload.kernels.native.structs import BLOCK, Attention
from offload.settings.kv_formats import PACKED_KV
from tests.support.paths import ROOT

SOURCE = ROOT / "offload" / "kernels" / "native" / "kernel.c"
DTYPES = [torch.bfloat16, torch.float32]
NAN = float("nan")
BUILD_SECONDS = 600  # by the wall: 6 s of a processor, which a busy machine may not give for minutes


def build_emulated(cache: Path) -> Path:
    """Return a library whose AVX-512 code runs on any x86 processor: special instructions are plain C.

    It is built once for the sources that it is built from, and kept in a folder that all test processes share.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    flags = ["-DTRIFORCE_EMULATE", "-std=gnu11", "-Og", "-pthread", "-fPIC", "-Wno-psabi"]
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60).stdout
    digest = hashlib.sha256(repr((flags, version)).encode())
    for source in sorted(SOURCE.parent.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    library = cache / f"emulated-{digest.hexdigest()[:16]}.so"
    with FileLock(cache / "emulated.lock", timeout=BUILD_SECONDS):
        if not library.exists():
            for old in cache.glob("emulated-*"):
                old.unlink()
            compiled, linked = cache / "emulated-new.o", cache / "emulated-new.so"
            subprocess.run([compiler, *flags, "-c", SOURCE, "-o", compiled], check=True, timeout=BUILD_SECONDS)
            subprocess.run([compiler, "-shared", compiled, "-lm", "-o", linked], check=True, timeout=BUILD_SECONDS)
            linked.replace(library)
    return library


def linear(kernel, x, weight, bias=None, onto=None, y=None, format=None):
    """Return x W^T + bias + onto, in the dtype of `y` and in its memory; `weight` is packed."""
    inputs, operations = x.shape[1], NativeOperations(kernel)
    made = NativeLinear(operations, [Panels(weight, y.shape[1], format, inputs)], bias)
    if onto is not None:
        return made(x, y.copy_(onto))
    made.into(x, y)
    return y


def draw(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill_blocks(keys, values):
    """Return blocks `[kv_heads, blocks, 2 * 16 * head_dim]` as in types.h, with NaN behind the last token."""
    heads, count, dim = keys.shape
    full = torch.full((2, heads, -(-count // BLOCK) * BLOCK, dim), NAN, dtype=keys.dtype)
    full[0, :, :count], full[1, :, :count] = keys, values
    keys, values = full.unflatten(2, (-1, BLOCK))
    if keys.dtype == torch.float32:
        keys = keys.transpose(2, 3)
    else:  # pairs of dimensions, pairs of tokens
        keys = keys.unflatten(3, (-1, 2)).transpose(2, 3)
        values = values.unflatten(2, (-1, 2)).transpose(3, 4)
    return torch.cat((keys.flatten(2), values.flatten(2)), dim=2)


def packed_runs(keys, values):
    """Return runs `[n, bytes]` of keys and values `[n, 128, head_dim]` in bf16, and whether each fits, `[n]`."""
    try:
        kernel = find_kernel("portable")
    except KernelUnavailable:
        pytest.skip("there is no native kernel here")
    count, device = len(keys), keys.device
    blocks = fill_blocks(keys.cpu(), values.cpu()).flatten(0, 1).unsqueeze(0)
    runs = torch.zeros((1, count, PACKED_KV.run_bytes(keys.shape[2])), dtype=torch.uint8)
    own = torch.arange(count * RUN_BLOCKS).view(count, -1)
    items = torch.cat((torch.zeros(count, 1), torch.arange(count)[:, None], own), 1).to(torch.int32)
    fits = torch.zeros(count, dtype=torch.uint8)
    kernel.pack_runs(pack_call(blocks, runs, items, fits))
    return runs[0].to(device), fits.bool().to(device)


def scatter_blocks(blocks, seed=0):
    """Return the blocks in a random order per head, among as many blocks of NaN, and their block table.

    The rows of the table are longer than the used part.
    """
    heads, count, size = blocks.shape
    generator = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(2 * count, generator=generator) for _ in range(heads)])
    scattered = torch.full((heads, 2 * count, size), NAN, dtype=blocks.dtype)
    scattered.scatter_(1, table[:, :count, None].expand_as(blocks), blocks)
    return scattered, table.to(torch.int32)


def attention(kernel, q, blocks, seen, table=None, causal=True, narrow=False, parents=None, groups=None):
    """Return the kernel's out `[tokens, heads, head_dim]` and lse `[tokens, heads]`; their memory starts as NaN."""
    out = torch.full(q.shape, NAN, dtype=q.dtype if narrow else torch.float32)
    lse = torch.full(q.shape[:2], NAN)
    kernel.attend(
        _call(
            *(q, blocks, seen, table, causal, parents, groups),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            narrow_out=narrow,
        )
    )
    return out, lse


def partial_results(kernel, q, blocks, seen, table=None, parents=None):
    """Return the partial result of each piece, `[pieces, tokens, heads, 2 + head_dim]`."""
    pieces = partial_count(seen, len(q), True, parents)
    found = torch.full((pieces, *q.shape[:2], 2 + q.shape[2]), NAN)
    kernel.attend(_call(q, blocks, seen, table, True, parents, None, partials=found.data_ptr()))
    return found


def _call(q, blocks, seen, table, causal, parents, groups, **outputs):
    tokens, heads, dim = q.shape
    return Attention(
        q=q.data_ptr(),
        kv=blocks.data_ptr(),
        table=None if table is None else table.data_ptr(),
        head_stride=blocks.stride(0) * blocks.itemsize,
        table_stride=0 if table is None else table.stride(0),
        seen=seen,
        causal=causal,
        tokens=tokens,
        kv_heads=len(blocks),
        group=heads // len(blocks),
        head_dim=dim,
        wide=q.dtype == torch.float32,
        scale=dim**-0.5,
        parents=None if parents is None else parents.data_ptr(),
        nodes=0 if parents is None else len(parents),
        quantized=None if groups is None else groups.memory.data_ptr(),
        quantized_stride=0 if groups is None else groups.memory.stride(0),
        kv_format=None if groups is None else ctypes.addressof(groups.format),
        **outputs,
    )


def definition(q, keys, values, seen, causal=True):
    """Return the same in fp64, from all keys; each row sees its first `seen` plus its own index, if causal."""
    tokens, _, dim = q.shape
    grouped = q.double().unflatten(1, (len(keys), -1))  # [tokens, kv_heads, group, head_dim]
    scores = torch.einsum("thgd,hkd->thgk", grouped, keys.double()) / dim**0.5
    sight = seen + torch.arange(tokens) * int(causal)
    scores.masked_fill_((torch.arange(keys.shape[1]) >= sight[:, None])[:, None, None], float("-inf"))
    out = torch.einsum("thgk,hkd->thgd", scores.softmax(-1), values.double())
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1)


def distance(found, expected):
    """Return the norm of the difference, relative to the norm of `expected`."""
    return ((found.double() - expected).norm() / expected.norm()).item()
