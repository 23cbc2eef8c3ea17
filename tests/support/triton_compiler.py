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
from triton._C.libtriton import ir

folder, name, jobs = *sys.argv[1:3], json.loads(sys.argv[3])
package = sys.modules["kernels"] = types.ModuleType("kernels")  # of these modules alone, which import no torch
package.__path__ = [folder]
module = importlib.import_module(f"kernels.{name}")
target = GPUTarget("cuda", 80, 32)
for name, types, constants in jobs:
    kernel = getattr(module, name)
    types = {each: types.get(each, "i32") if each not in constants else "constexpr" for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
print("compiled", len(jobs))
"""


def compile_all(module, jobs):
    """Run the compiler's first pass, which checks types: each job is a name, types of arguments (else i32), constants.

    scripts/compile_kernels.py compiles to machine code.
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


COUNT = """
import importlib, json, sys, types
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

folder, name, kernel, calls = *sys.argv[1:4], json.load(sys.stdin)
package = sys.modules["kernels"] = types.ModuleType("kernels")
package.__path__ = [folder]
kernel = getattr(importlib.import_module(f"kernels.{name}"), kernel)
key = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 89, 32)))
print(json.dumps([repr(key(*positional, **named)[1:]) for positional, named in calls]))
"""


def variants(module, kernel, calls):
    """Return what Triton looks a compiled kernel up by, a text for each call: another one is compiled anew.

    calls: positional and named arguments each, tensors as None.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COUNT, ROOT / "offload/kernels/triton", module, kernel],
        env=environment,
        input=json.dumps(calls),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


class Launches:
    """Stands for a kernel: keeps the arguments of its launches, for `variants`."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *positional, **named):
        self.calls.append(([None if hasattr(each, "data_ptr") else each for each in positional], named))
