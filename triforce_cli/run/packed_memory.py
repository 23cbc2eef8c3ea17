"""Packs the keys and values of one sequence in a CPU's memory where `triforce doctor` has measured that it pays."""

from __future__ import annotations

import os
from dataclasses import replace

from offload.errors import SettingsError, UnusableMeasurement
from offload.hardware import calibration
from offload.settings.kv_formats import AUTO, PACKED_KV

from ..options.settings import config_home
from .model_request import ModelRequest


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
    import torch

    if not measured.packed.is_clear(model.config.threads or torch.get_num_threads(), model.kernel):
        return opened
    packed = replace(model, config=replace(model.config, kv=PACKED_KV.name))
    try:
        packed.check_kv()
    except SettingsError:  # heads of other sizes, fp32, another format of selected chunks
        return opened
    settings = replace(opened.settings, engine=packed.config)
    return replace(opened, model=packed, request=replace(opened.request, settings=settings))
