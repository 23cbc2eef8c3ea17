"""Triton's compiler, which needs no GPU, on kernels of offload/kernels/triton; in a process without the interpreter."""

import json
import os
import subprocess
import sys

from tests.support.paths import ROOT

COMPILE = """
import importlib, json, sys, types
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import compile
from triton._C.libtriton import ir

folder, name, jobs = *sys.argv[1:3], json.loads(sys.argv[3])
package = sys.modules["kernels"] = types.ModuleType("kernels")  # of these modules alone, which import no torch
package.__path__ = [folder]
module = importlib.import_module(f"kernels.{name}")
target = GPUTarget("cuda", 80, 32)
for name, types, constants, is_whole in jobs:
    kernel = getattr(module, name)
    types = {each: types.get(each, "i32") if each not in constants else "constexpr" for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    if is_whole:
        assert len(compile(source, target=target, options={"num_stages": 4}).asm["cubin"]) > 1000
        continue
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
print("compiled", len(jobs))
"""


def compile_all(module, jobs):
    """Compile kernels of a module: each job is a name, types of arguments (i32 if not given), constants, `is_whole`.

    `is_whole`: to machine code for compute capability 8.0; otherwise the first pass, which checks types.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, ROOT / "offload/kernels/triton", module, json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"compiled {len(jobs)}\n"
