"""Triton's kernels as machine code for GPUs that are not here: by scripts/compile_kernels.py."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from offload.kernels.triton import BLOCKS, attend, ops, packed_kv, quantized_kv
from offload.kernels.triton.ops import attend_groups, attend_runs
from offload.settings.kv_formats import PACKED_KV, PLANE_KV
from tests.support.paths import ROOT
from tests.support.triton_compiler import Launches

pytest.importorskip("triton")
if sys.platform != "linux":
    pytest.skip("Triton's compiler comes with its Linux wheels", allow_module_level=True)
SCRIPT = ROOT / "scripts/compile_kernels.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compile_kernels", SCRIPT)
    module = sys.modules["compile_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", [1, 22])
def test_the_variants_are_those_that_are_launched(script, monkeypatch, tokens):
    plain, groups, packed = Launches(), Launches(), Launches()
    monkeypatch.setattr(packed_kv, "attend_runs_kernel", packed)
    monkeypatch.setattr(attend, "attend_kernel", plain)
    monkeypatch.setattr(quantized_kv, "attend_groups_kernel", groups)
    known = [each.constants | each.options for each in script.variants()]
    for group, head_dim in script.MODELS.values():
        q, keys = torch.zeros(tokens, group, head_dim, dtype=torch.bfloat16), torch.zeros(1, 64, head_dim).bfloat16()
        state = ops.new_state(q, 2)
        ops.attend(q, keys, keys, state, 3)
        ops.attend(q, keys, keys, state, 3, layout=BLOCKS)
        ops.attend(q, keys, keys, state, 0, table=torch.zeros(1, 4).int(), chunk=8, lengths=torch.zeros(3).int())
        for stored in (PACKED_KV, PLANE_KV):
            runs = torch.zeros(1, 1, stored.run_bytes(head_dim)).byte()
            attend_runs(q, runs, torch.zeros(1, 1).int(), keys, keys, state, 3)
        attend_groups(q, torch.zeros(1, 1, 9000, dtype=torch.uint8), state, 1, True)
    for _, launched in plain.calls + groups.calls + packed.calls:
        assert launched | {"WIDEN": False} in known


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 120])
def test_every_variant_fits_a_gpu_and_spills_nothing(arch):
    run = subprocess.run([sys.executable, SCRIPT, "--archs", str(arch), "--json"], capture_output=True, text=True)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) > 90, run.stderr
    assert [f"{each['name']}: {each['faults']}" for each in found if each["faults"]] == []
    # A row's sum must not depend on the rows beside it: blocks of rows are divided among warps in the same way.
    layouts = {}
    for each in found:
        layouts.setdefault((each["kernel"], each["name"].rpartition(" ")[0].rpartition(" ")[0]), []).append(
            each["layouts"]
        )
    assert all(each == every[0] for every in layouts.values() for each in every)
    # Packed keys and values have the bits of plain ones.
    for (kernel, name), every in layouts.items():
        if kernel == "attend_runs_kernel":
            plain = name.replace("packed", "plain").replace("plane A", "plain")
            assert every == layouts["attend_kernel", plain]
