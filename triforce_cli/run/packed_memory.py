"""Packs the keys and values of one sequence in one memory where --kv is auto, and it pays.

In a CPU's memory, where `triforce doctor` has measured that; in a GPU's, where they only fit so, by the plan.
"""

import os
from dataclasses import replace

import torch

from offload.errors import SettingsError, UnusableMeasurement
from offload.hardware import calibration
from offload.planning.plan import make_plan
from offload.settings.kv_formats import AUTO, PACKED_KV

from ..options.settings import config_home
from ..output.terminal import Terminal
from .measured_rates import load_measured
from .model_request import ModelRequest
from .plan import request_on_this_machine


def packed_where_faster(opened: ModelRequest) -> ModelRequest:
    """Return the request with packed keys and values if --kv is auto, they are in one memory, and it pays there.

    It pays if attention to them was measured to be clearly faster, with as many threads at the same kernel level.
    """
    model, placement = opened.model, opened.settings.placement
    is_one_memory = model.device.type == "cpu" and placement.link_gb_s is None and placement.disk is None
    if opened.settings.engine.kv != AUTO or not is_one_memory or model.group.size > 1 or model.kernel == "off":
        return opened
    try:
        measured = calibration.load(config_home(os.environ))
    except UnusableMeasurement:  # of which who plans with it warns
        return opened
    if measured is None or measured.packed is None:
        return opened
    if not measured.packed.is_clear(model.config.threads or torch.get_num_threads(), model.kernel):
        return opened
    return _packed(opened)


def packed_where_it_fits(opened: ModelRequest, tokens: int, terminal: Terminal) -> ModelRequest:
    """Return the request with packed keys and values if the plan for `tokens` keeps them on the GPU, and none others.

    Ranks that share a model need one format: there, nothing is changed.
    """
    model, settings = opened.model, opened.settings
    is_one_gpu = model.device.type == "cuda" and model.group.size == 1
    if settings.engine.kv != AUTO or not is_one_gpu or settings.speculation.approximate is not None:
        return opened
    try:
        request, _ = request_on_this_machine(model, settings, tokens, load_measured(terminal))
    except SettingsError:  # this GPU's rates are unknown
        return opened
    plan = make_plan(request)
    return _packed(opened) if plan.request.kv_format.is_packed and plan.offload == "none" else opened


def _packed(opened: ModelRequest) -> ModelRequest:
    """Return the request with packed keys and values; as it is if they cannot be: heads of other sizes, fp32."""
    packed = replace(opened.model, config=replace(opened.model.config, kv=PACKED_KV.name))
    try:
        packed.check_kv()
    except SettingsError:
        return opened
    settings = replace(opened.settings, engine=packed.config)
    return replace(opened, model=packed, request=replace(opened.request, settings=settings))
