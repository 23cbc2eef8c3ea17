"""Plans with plane A of packed keys and values on a GPU and plane B on its host: where they pay, and their bytes."""

from dataclasses import replace

import pytest
import torch

from offload.architecture.pages import host_page_bytes
from offload.architecture.weight_formats import rounded_bits
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.kernels.native.ops import NativeOperations
from offload.loading.hub.download import dimensions
from offload.memory.factory import TieredStoreFactory
from offload.planning.inputs import PlanInputs
from offload.planning.plan import make_plan
from offload.settings.config import Placement
from offload.units import GIB
from tests.support.offloading import CPU, make_link, native_kernel, settings
from tests.support.stores import tiny_shape
from triforce_cli.output.plan_fields import flags_of


def request_for(model, gpu="rtx-4090", level="q4", **placement):
    shape = dimensions(model)
    bits = None if level is None else rounded_bits(shape, level)
    return PlanInputs(
        model=model,
        shape=shape,
        tokens=131072,
        hardware=describe(profiles.load(gpu)),
        placement=Placement(**placement),
        weight_bits=bits,
        quantize=level,
        kv="auto",
        packs=True,
    )


def test_a_model_whose_plane_a_fits_a_gpu_beside_its_weights_drafts_from_it():
    request = request_for("Qwen3-14B", offload="planes")
    plan, other = make_plan(request), make_plan(replace(request, placement=Placement()))
    assert (plan.offload, plan.inputs.kv, plan.inputs.speculation.middle) == ("planes", "packed", "plane")
    assert plan.fits and plan.chosen.tbt.seconds * 1.2 < other.chosen.tbt.seconds
    away = plan.inputs.shape.kv_layers - plan.placed.resident_layers
    assert plan.host.parts["KV cache"] == pytest.approx(away * 131072 * 8 * 128 * 2 / 2, rel=0.01)  # half a byte each
    flags = flags_of(plan)
    assert flags[flags.index("--offload") + 1] == "planes" and "--middle" not in flags


def test_who_asks_for_planes_gets_them_where_keys_and_values_are_divided():
    plans = [
        make_plan(request_for(*model, offload="planes")) for model in (("Llama-3.1-8B", "rtx-4080"), ("Llama-3.1-8B",))
    ]
    assert [plan.offload for plan in plans] == ["planes", "none"]
    fits_packed = make_plan(request_for("Llama-3.1-8B", level="q8", offload="planes"))  # as auto does not have it
    assert fits_packed.offload == "planes" and fits_packed.fits
    small = make_plan(request_for("Llama-3.1-8B", offload="planes", memory=10 * GIB))
    assert not small.fits or small.placed.weight_layers < 32


def test_what_is_allocated_is_what_is_counted():
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    shape, tiers = tiny_shape(), settings("planes", page_tokens=256)
    factory = TieredStoreFactory(NativeOperations(native_kernel()), CPU, tiers, make_link(), kv="packed")
    pages = factory.new_store(shape, 700, torch.bfloat16).tiers.pages
    assert pages.nbytes == host_page_bytes(shape, shape.layers, 700, 256, 2, "packed", in_planes=True)
    packed = host_page_bytes(shape, shape.layers, 768, 256, 2, "packed")
    assert packed - 4096 * 9 <= pages.nbytes + pages.planes.nbytes <= packed
