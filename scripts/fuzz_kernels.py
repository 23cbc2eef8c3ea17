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
import sys
from collections import Counter
from pathlib import Path

import torch
from fuzz_attention import append_case, attention_case, dimensions, observe_case, score_case
from fuzz_draws import DTYPES, Draw, Wrong, equal
from fuzz_linears import delta_case, linear_case, norm_case, quantised_case, rounding_case
from torch import Tensor

from offload.kernels.native import LEVELS, Kernel, KernelUnavailable, find_kernel
from offload.kernels.native.calls import BlockCalls, merge_call
from offload.kernels.native.checks import InvalidCall

OTHERS = (torch.float16, torch.float64, torch.int32, torch.int64, *DTYPES)
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
