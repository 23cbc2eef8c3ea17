"""What is compiled before decoding is all that decoding launches: by what Triton looks a compiled kernel up by."""

import sys

import pytest
import torch

from offload.architecture.rope import Rope
from offload.caches.full import FullCache
from offload.errors import Degraded
from offload.kernels import triton
from offload.kernels.ops import CudaOperations
from offload.kernels.triton import attend, pack_runs, packed_kv, quantized, quantized_kv, row_ops, rows
from offload.kernels.triton.accumulate import attend_table, attend_table_before
from offload.kernels.triton.warm_up import Needs, warm_up
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory import device_packed_store
from offload.memory.device_packed_store import DevicePackedStore
from offload.memory.device_quantized_store import DeviceQuantizedStore
from offload.memory.plain_store import PlainStore
from offload.memory.tree_attention import tree_of
from offload.model.warm_up import warm_up_model
from tests.support.offloading import CPU
from tests.support.stores import tiny_shape
from tests.support.triton_compiler import Launches, variants

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels")
KERNELS = {
    attend: ("attend_kernel", "finish_kernel"),
    quantized_kv: ("attend_groups_kernel",),
    packed_kv: ("attend_runs_kernel", "unpack_kernel"),
    pack_runs: ("pack_kernel",),
    rows: ("append_kernel", "norm_kernel", "gate_kernel"),
}
CAPACITY, CHUNK, CYCLES = 900, 8, 60
STORES = {"bf16": PlainStore, "packed": DevicePackedStore, "q8": DeviceQuantizedStore}


@pytest.fixture
def launches(monkeypatch):
    """Return what kernels are launched with; they compute nothing."""
    monkeypatch.setattr(triton, "serves", lambda q: len(q) <= triton.ROWS)
    monkeypatch.setattr(triton, "serves_rows", lambda x: True)
    found = {}
    for module, names in KERNELS.items():
        for name in names:
            found[module, name] = Launches()
            monkeypatch.setattr(module, name, found[module, name])
    return found


def new_cache(kv):
    args = tiny_shape(), CAPACITY, torch.bfloat16, CPU
    store = STORES[kv](*args) if kv == "bf16" else STORES[kv](*args, kv)
    return FullCache(store, Rope(tiny_shape(), CAPACITY, torch.bfloat16, CPU), CAPACITY)


def drawn(tokens):
    shape = tiny_shape()
    x = torch.zeros(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    return x.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)


def assert_compiled(module, name, first, own):
    """Fail if one of a kernel's `own` launches looks up a variant that none of the `first` ones does."""
    first, own = (list({repr(call): call for call in calls}.values()) for calls in (first, own))
    looked_up = variants(module.__name__.rpartition(".")[2], name, [*first, *own])
    assert set(looked_up[len(first) :]) <= set(looked_up[: len(first)]), name


def decode(kv, monkeypatch):
    """Run cycles of drafts, recorded steps, trees, rollbacks and, over a table, of a retrieval cache."""
    pack = device_packed_store.pack_runs
    monkeypatch.setattr(device_packed_store, "pack_runs", lambda *call: torch.ones_like(pack(*call)))  # all of them fit
    full, shape = new_cache(kv), tiny_shape()
    x = torch.ones(8, shape.hidden, dtype=torch.bfloat16)
    for cycle in range(CYCLES):
        tokens = 1 + cycle % 8
        full.begin(tokens)
        row_ops.gated(row_ops.rms_norm(x[:tokens], x[0], 1e-5))
        full.attend(0, *drawn(tokens))
        full.commit()
        full.truncate(full.length - cycle % 3 if cycle % 3 < tokens else full.length)
        if full.store.deepest_tree(full.length) >= 4:
            full.begin(5, tree_of((-1, 0, 0, 1, 3)))
            full.attend(0, *drawn(5))
            full.hold()
            full.commit([0, 1])
        if kv != "bf16":
            full.store.gather(torch.tensor([0]), torch.tensor([cycle % 2]), 32)
            continue
        step = full.new_step(1 << cycle % 5)
        full.begin(1)
        step.load()
        step.attend(0, *drawn(1 << cycle % 5))
        full.commit()
        q, (keys, values) = drawn(tokens)[0].contiguous(), full.store.layer(0)
        table = torch.zeros(shape.kv_heads, 1 + cycle % 20, dtype=torch.int32)
        attend_table(q, keys, values, table, CHUNK, (8 * table.shape[1] + 5, full.length - 5))
        attend_table(q, keys, values, table, CHUNK, torch.zeros(3, dtype=torch.long))
        attend_table_before(q, keys, values, table, CHUNK, (8 * table.shape[1] + 5, full.length - 5))


@pytest.mark.daily("bf16")
@pytest.mark.parametrize("kv", STORES)
def test_nothing_compiles_in_mid_run(kv, launches, monkeypatch):
    """Every variant that 60 cycles launch has been launched before the first of them."""
    chunk = CHUNK if kv == "bf16" else 0
    warm_up(tiny_shape(), torch.bfloat16, CPU, Needs(kv, chunk=chunk, records=kv == "bf16"))
    before = {key: list(each.calls) for key, each in launches.items()}
    decode(kv, monkeypatch)
    for (module, name), each in launches.items():
        if calls := each.calls[len(before[module, name]) :]:
            assert_compiled(module, name, before[module, name], calls)
    assert len(launches[attend, "finish_kernel"].calls) > CYCLES


def test_products_with_quantised_weights_compile_before_the_first_prompt(tiny_model_dir, monkeypatch):
    names = "product_kernel", "add_splits_kernel", "dequantize_kernel"
    found = {name: Launches() for name in names}
    for name, each in found.items():
        monkeypatch.setattr(quantized, name, each)
    monkeypatch.setattr(triton, "serves_quantized", lambda device: True)
    model = load_model(
        FolderCheckpoint(tiny_model_dir).rounded("q4"),
        torch.bfloat16,
        CPU,
        lambda done, total: None,
        CudaOperations(),
    )
    warm_up_model(model)
    before = {name: len(each.calls) for name, each in found.items()}
    with torch.inference_mode():
        for tokens in range(1, 81):
            model.logits(model.forward(torch.zeros(tokens, dtype=torch.long), model.new_cache(tokens + 7)))
    for name, each in found.items():
        first, own = each.calls[: before[name]], each.calls[before[name] :]
        assert own, name
        assert_compiled(quantized, name, first, own)


def test_what_cannot_be_compiled_is_a_warning(launches, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(rows.norm_kernel, "_launch", fail)
    with pytest.warns(Degraded, match="compiled ahead: out of shared memory"):
        warm_up(tiny_shape(), torch.bfloat16, CPU, Needs())
