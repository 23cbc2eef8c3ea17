#!/usr/bin/env python
"""Compile the Triton kernels for GPUs that are not here, and print what each variant takes of a processor.

scripts/compile_kernels.py                     # every variant for every architecture; minutes
scripts/compile_kernels.py --archs 89 attend   # those of one kernel for one architecture

Needs Triton, and no GPU: its compiler and NVIDIA's assembler come with its wheel. A line names the variant, its
registers, its shared memory, and of its longest loop the instructions and the bytes that an iteration reads from
memory. Exits with 1 if a variant does not compile, takes more shared memory than a block may have, or spills registers
in that loop with heads of up to 128 numbers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # of a block at most (CUDA programming guide, table 31)
MODELS = {  # query heads of a KV head, head size
    "Llama-2-7B": (1, 128),
    "Llama-3.1-8B": (4, 128),
    "Qwen2.5-7B": (7, 128),
    "Qwen3-30B-A3B": (8, 128),
    "Phi-3-mini": (1, 96),
    "gemma-3": (2, 256),
    "gpt-oss": (8, 64),
}
FORMATS = {  # of weights: bits, the constants that are not 0
    "Q4_0": (4, {"FIRST": -8}),
    "Q4_1": (4, {"HAS_MINIMUM": True}),
    "Q5_0": (5, {"FIRST": -16}),
    "Q5_1": (5, {"HAS_MINIMUM": True}),
    "Q8_0": (8, {"FIRST": -128}),
    "Q4_K": (4, {"HAS_MINIMUM": True, "NESTED": True}),
    "Q5_K": (5, {"HAS_MINIMUM": True, "NESTED": True}),
    "Q6_K": (6, {"FIRST": -32, "HALVES": True, "NESTED": True}),
    "MXFP4": (4, {"HAS_TABLE": True}),
    "int4 of 128": (4, {"FIRST": -8, "WIDE": 4}),
    "int4 with minima": (4, {"WIDE": 4, "HAS_MINIMUM": True}),
    "int8 with minima": (8, {"FIRST": -128, "WIDE": 4, "HAS_MINIMUM": True}),
    "fp8": (8, {"IS_FLOAT": True, "WIDE": 4}),
}
LARGEST_WITHOUT_SPILLS = 128  # head size
_ALIGNED = ("stride_head", "stride_token", "stride_plain")  # arguments that are multiples of 16
_FORMAT_FLAGS = ("FIRST", "HAS_TABLE", "NESTED", "IS_FLOAT", "HALVES", "HAS_MINIMUM")


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants. `types`: of arguments that are not 32-bit integers; `read`: bytes an iteration."""

    module: str
    kernel: str
    name: str
    types: dict[str, str]
    constants: dict[str, int]
    read: float
    options: dict[str, int] = field(default_factory=dict)
    head_dim: int = 0


@dataclass(frozen=True)
class Compiled:
    """What a variant takes: registers a thread, bytes of stack and shared memory, its longest loop's instructions.

    `spills` are those of the loop: once before and once after thousands of keys, a register may well be put aside.
    """

    registers: int
    stack: int
    shared: int
    loop: int
    spills: int
    layouts: list[str]  # of its matrix products: how rows and columns are divided among warps

    def faults(self, variant: Variant, arch: int) -> list[str]:
        """Return what is wrong with it, as texts."""
        found = []
        if self.shared > SHARED_KIB[arch] * 1024:
            found.append(f"{self.shared} bytes of shared memory of {SHARED_KIB[arch]} KiB")
        if self.spills and 0 < variant.head_dim <= LARGEST_WITHOUT_SPILLS:  # attention, and what packs for it
            found.append(f"{self.spills} spills a loop, {self.stack} bytes")
        return found


def variants() -> Iterator[Variant]:
    """Yield every variant that decoding with one of the models, KV formats and weight formats launches."""
    for model, (group, head_dim) in MODELS.items():
        for rows in (16, 32):
            yield from _attention(model, group, head_dim, rows)
    yield Variant(
        "attend", "finish_kernel", "heads of 128", {"state_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"},
        {"HEAD_DIM": 128, "BLOCK_D": 128, "HAS_LSE": True, "STATES": 16}, 16 * 130 * 4,
    )  # fmt: skip
    observed = {"GROUP": 4, "HEAD_DIM": 128, "WIDEN": False, "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_D": 128}
    pointers = dict.fromkeys(("q_ptr", "k_ptr"), "*bf16") | dict.fromkeys(("lse_ptr", "received_ptr"), "*fp32")
    yield Variant("attend", "observe_kernel", "heads of 128", pointers | {"scale": "fp32"}, observed, 32 * 128 * 2)
    yield from _packing()
    for name, (bits, others) in FORMATS.items():
        for rows in (16, 32, 64):
            yield _product(name, bits, others, rows)
        dequantized = _product(name, bits, others, 64)
        constants = {each: dequantized.constants[each] for each in (*_FORMAT_FLAGS, "WIDE", "BITS", "BLOCK_N")}
        yield replace(dequantized, kernel="dequantize_kernel", name=name, constants=constants | {"HAS_IDS": True})
    added = _product("Q4_K", *FORMATS["Q4_K"], 16)
    yield replace(added, name="Q4_K added 16 rows", constants=added.constants | {"HAS_BIAS": True, "ADD": True})


def _attention(model: str, group: int, head_dim: int, rows: int) -> Iterator[Variant]:
    width = 1 << (head_dim - 1).bit_length()
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_M": rows, "BLOCK_D": width, "WIDEN": False}
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16") | {"state_ptr": "*fp32", "table_ptr": "*i32"}
    pointers |= {"seen_ptr": "*i64", "scale": "fp32"}
    keys = min(64, 2**13 // width)  # as ops.py's tiles
    kinds = {"plain": (0, 0, 3), "table": (0, 8, 3), "blocks": (1, 0, 2)}
    for kind, (layout, chunk, stages) in kinds.items():
        constants = {"LAYOUT": layout, "CHUNK": chunk, "CAUSAL": True, "HAS_SEEN": chunk > 0, "BLOCK_N": keys}
        constants |= {"FRESH": True}
        yield Variant(
            "attend", "attend_kernel", f"{model} {kind} {rows} rows", pointers, sizes | constants,
            keys * head_dim * 4, {"num_stages": stages}, head_dim,
        )  # fmt: skip
    for kind in ("q8",):
        constants = {"FRESH": True}
        yield Variant(
            "quantized_kv", "attend_groups_kernel", f"{model} {kind} {rows} rows",
            {"q_ptr": "*bf16", "groups_ptr": "*u8", "state_ptr": "*fp32", "scale": "fp32"}, sizes | constants,
            4 * head_dim + 128 + 64 * head_dim, {"num_stages": 2}, head_dim,
        )  # fmt: skip

    for kind, is_plane in (("packed", False), ("plane A", True)):
        constants = {"CAUSAL": True, "HAS_SEEN": False, "PLANE": is_plane, "FRESH": True, "BLOCK_N": keys}
        own = pointers | {"runs_ptr": "*u8", "places_ptr": "*i32"}
        yield Variant(
            "packed_kv", "attend_runs_kernel", f"{model} {kind} {rows} rows", own, sizes | constants,
            keys * head_dim * (2 if is_plane else 3), {"num_stages": 2}, head_dim,
        )  # fmt: skip


def _packing() -> Iterator[Variant]:
    """Yield what packs and unpacks keys and values."""
    types = dict.fromkeys(("k_ptr", "v_ptr", "keys_ptr", "values_ptr"), "*bf16") | {"places_ptr": "*i32"}
    types |= dict.fromkeys(("runs_ptr", "fits_ptr"), "*u8") | dict.fromkeys(("rows_ptr", "starts_ptr"), "*i64")
    for head_dim in (64, 96, 128, 256):
        sizes = {"HEAD_DIM": head_dim, "BLOCK_D": 1 << (head_dim - 1).bit_length()}
        name, read = f"heads of {head_dim}", 4 * 128 * head_dim
        yield Variant(
            "pack_runs", "pack_kernel", name, types, sizes, read, {"num_warps": 4 if head_dim <= 64 else 8}, head_dim
        )
        unpacked = sizes | {"HAS_VALUES": True}
        yield Variant("packed_kv", "unpack_kernel", name, types, unpacked, read * 3 / 16, {}, head_dim)


def _product(name: str, bits: int, others: dict[str, int], rows: int) -> Variant:
    wide = others.get("WIDE", 1)
    nested = "NESTED" in others
    number = "*fp32" if wide > 1 else "*i8" if nested else "*fp16"
    pointers = {"codes_ptr": "*i8" if bits == 8 else "*u8", "high_ptr": "*i32", "levels_ptr": "*fp32"}
    pointers |= dict.fromkeys(("scales_ptr", "minima_ptr"), number)
    pointers |= dict.fromkeys(("factors_ptr", "minimum_factors_ptr"), "*fp16")
    pointers |= dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16") | {"ids_ptr": "*i64"}
    flags = (*_FORMAT_FLAGS, "HAS_BIAS", "ADD", "WIDEN")
    constants = {**dict.fromkeys(flags, False), "FIRST": 0, "WIDE": 1, "BITS": bits, **others}
    constants |= {"BLOCK_N": 64, "BLOCK_M": rows}
    scales = (1 if nested else 4 / wide if wide > 1 else 2) * (1 + ("HALVES" in others) + ("HAS_MINIMUM" in others))
    return Variant(
        "quantized", "product_kernel", f"{name} {rows} rows", pointers, constants, 64 * (4 * bits + scales),
        {"num_stages": 3},
    )  # fmt: skip


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Return what a variant takes on an architecture: 89 is compute capability 8.9. Raises what the compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import compile

    kernel = getattr(_module(variant.module), variant.kernel)
    signature = {
        name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride_q") or name in _ALIGNED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    found = compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options)
    layouts = sorted(
        set(re.findall(r"versionMajor = \d+|warpsPerCTA = \[[\d, ]+\](?=, instrShape)", found.asm["ttgir"]))
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        loop, spills = _longest_loop(_tool("nvdisasm", "-c", file.name))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Compiled(registers, stack, found.metadata.shared, loop, spills, layouts)


def _module(name: str) -> types.ModuleType:
    """Return a module of kernels, without what imports torch beside it."""
    if "kernels" not in sys.modules:
        package = sys.modules["kernels"] = types.ModuleType("kernels")
        package.__path__ = [str(ROOT / "offload/kernels/triton")]
    return importlib.import_module(f"kernels.{name}")


def _tool(name: str, *arguments: str) -> str:
    from triton.backends import nvidia

    path = Path(nvidia.__file__).parent / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _longest_loop(assembly: str) -> tuple[int, int]:
    """Return the instructions from a label to the last branch back to it, at most, and how many of them spill."""
    labels: dict[str, int] = {}
    spilling: list[int] = []
    count, longest = 0, range(0)
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/\s+.*;", line):
            count += 1
            if re.search(r"\b(STL|LDL)\b", line):
                spilling.append(count)
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if target and target[1] in labels:
                longest = max(longest, range(labels[target[1]] + 1, count + 1), key=len)
    return len(longest), sum(each in longest for each in spilling)


def main() -> int:
    """Print a line a variant and architecture; return 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only variants whose kernel or name has one of these words")
    parser.add_argument("--archs", default=",".join(map(str, SHARED_KIB)), help="compute capabilities: 80,89")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    faults = 0
    for variant in variants():
        if args.words and not any(word in f"{variant.kernel} {variant.name}" for word in args.words):
            continue
        for arch in map(int, args.archs.split(",")):
            try:
                found = compile_variant(variant, arch)
            except Exception as error:
                found, wrong = None, [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
            else:
                wrong = found.faults(variant, arch)
            faults += bool(wrong)
            print(_line(variant, arch, found, wrong, args.json), flush=True)
    return 1 if faults else 0


def _line(variant: Variant, arch: int, found: Compiled | None, wrong: list[str], as_json: bool) -> str:
    if as_json:
        about = {"kernel": variant.kernel, "name": variant.name, "arch": arch, "read": variant.read, "faults": wrong}
        return json.dumps(about | (vars(found) if found else {}))
    head = f"sm_{arch:<4} {variant.kernel:21} {variant.name:28}"
    if found is None:
        return f"{head} {wrong[0]}"
    # Four warps of a program run on four schedulers: an instruction of each takes a cycle.
    rate = variant.read / found.loop if found.loop else 0
    return (
        f"{head} {found.registers:4} registers {found.shared / 1024:6.1f} KiB {found.loop:5} instructions a loop,"
        f" {rate:5.1f} bytes a cycle{''.join(f'; {text}' for text in wrong)}"
    )


if __name__ == "__main__":
    sys.exit(main())
