"""Measure passes of a mixture whose experts are in host memory: run there or copied."""

from __future__ import annotations

from dataclasses import replace

import torch
from gpu_machine import Machine
from gpu_models import random_model, resident_cache, run_rows
from gpu_rows import Rows, Skipped
from torch import Tensor
from transformers import Qwen3MoeConfig

from offload.architecture.config import ModelShape
from offload.architecture.hf_config import shape_from_config
from offload.kernels.ops import choose_operations
from offload.model.decoder import Model
from offload.planning.passes import Passes
from offload.planning.placement import Placed, place
from offload.planning.request import PlanRequest
from offload.settings.config import Speculation
from offload.weight_offloading.experts import ExpertTier
from offload.weight_offloading.layer_stream import WeightTier

ROWS = (1, 8)
CHUNK = 512  # rows of a pass that copies all experts, and reads ahead
MOST_ERROR = {"host": 3e-2}  # relative to the rows of experts on the device: of another order of sums


def experts(machine: Machine, rows: Rows) -> dict:
    """Compare rows, times and memory with those of a model whose experts are all on the device, and with the plan."""
    shape, tokens = _shape(machine), 64 if machine.small else 2048
    size = shape.layers * shape.experts.count * shape.expert_parameters * machine.dtype.itemsize
    if not machine.fits_host(2 * size):
        raise Skipped("the host has too little memory")
    rows.add("model", f"{shape.layers} layers of {shape.experts.count} experts, {tokens:,} tokens on the device")
    expected = _rows_of(random_model(shape, machine.dtype, machine.device), machine, tokens)
    for way in MOST_ERROR:
        machine.clear()
        before = 0 if machine.small else torch.cuda.memory_allocated(machine.device)
        model = random_model(shape, machine.dtype, machine.device, _tier(machine, shape))
        request, placed = _planned(machine, shape, tokens, way)
        if not machine.small:
            held = torch.cuda.memory_allocated(machine.device) - before
            parts = placed.device.parts
            rows.compare_memory(f"weights on the device, {way}", held, parts["weights"] + parts.get("staging", 0))
        _check(rows, way, _rows_of(model, machine, tokens), expected)
        _time(machine, rows, way, model, Passes(request, placed), tokens)
        del model
    return {"shape": f"{shape.layers} layers, {size} bytes of experts"}


def _shape(machine: Machine) -> ModelShape:
    """Return the shape of Qwen3-30B-A3B with two layers."""
    if machine.small:
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
    else:
        sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000}
    config = Qwen3MoeConfig(num_hidden_layers=2, norm_topk_prob=True, max_position_embeddings=8192, **sizes)
    return shape_from_config(config.to_dict(), {})


def _tier(machine: Machine, shape: ModelShape) -> WeightTier:
    host = choose_operations("auto", shape, machine.dtype, torch.device("cpu"))
    link = machine.link()
    return WeightTier(shape.layers, link, ExpertTier(0, link, host))


def _planned(machine: Machine, shape: ModelShape, tokens: int, way: str) -> tuple[PlanRequest, Placed]:
    request = machine.request(shape, tokens, Speculation("ar"), "none")
    request = replace(request, placement=replace(request.placement, experts=way))
    return request, place(request)


def _rows_of(model: Model, machine: Machine, tokens: int) -> Tensor:
    """Return the rows of a chunk, of eight tokens and of one, in fp32 on the CPU."""
    cache, random = model.new_cache(tokens + CHUNK), torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.shape.vocab, (CHUNK + 9,), generator=random).to(machine.device)
    parts = [model.forward(part, cache).float().cpu() for part in ids.split([CHUNK, 8, 1])]
    return torch.cat(parts)


def _check(rows: Rows, way: str, found: Tensor, expected: Tensor) -> None:
    """Add a line with the median row's error. Raises RuntimeError if it is more than rounding.

    The median: where two experts are as likely, rounding may choose another one for a token.
    """
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
    if not error <= MOST_ERROR[way]:
        raise RuntimeError(f"experts by {way}: an error of {error:.1e} beside experts on the device")
    rows.add(f"experts by {way}", "as on the device", f"median error {error:.1e}")


def _time(machine: Machine, rows: Rows, way: str, model: Model, passes: Passes, tokens: int) -> None:
    cache = resident_cache(model, tokens)
    for count in ROWS:
        took = machine.seconds(lambda count=count: run_rows(model, cache, count), 8, 3)
        rows.compare(f"{way}, {count} rows", took, passes.full(count)[0].seconds)
