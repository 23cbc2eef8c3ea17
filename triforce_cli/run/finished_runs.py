"""Finished runs on this machine, by model: their times correct later plans of the same model."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from offload.metrics import Summary
from offload.planning.plan import Plan, make_plan
from offload.planning.roofline import Time
from offload.system.files import replace_file

from ..options.settings import config_home

FILE = "runs.json"
_FIELDS = {"tokens", "prefill_s", "token_s"}
_LEAST = 512  # computed tokens of a prompt whose time says something


def record(summary: Summary) -> None:
    """Keep the times of a run of one sequence, unless an earlier one of about its length was faster."""
    alone = summary.batch_size in (None, 1.0) and not summary.cached_tokens
    if not alone or summary.computed_tokens < _LEAST or summary.prefill_s is None or not summary.tokens_per_s:
        return
    runs, tokens = _runs(), summary.computed_tokens
    key = _key(summary.model, summary.quantize, summary.settings["device"])
    new = {"tokens": tokens, "prefill_s": summary.prefill_s, "token_s": 1 / summary.tokens_per_s}
    old = runs.get(key)
    if old is not None and tokens < 2 * old["tokens"]:
        if 2 * tokens < old["tokens"] or old["prefill_s"] / old["tokens"] < summary.prefill_s / tokens:
            new = old
        new["token_s"] = min(old["token_s"], 1 / summary.tokens_per_s)
    with suppress(OSError):  # a read-only folder: plans are less exact
        folder = config_home(os.environ)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / FILE, json.dumps(runs | {key: new}, indent=1).encode())


def corrected(plan: Plan) -> Plan:
    """Return a plan for this machine with its times scaled by those of a finished run of its model, if there is one."""
    inputs = plan.inputs
    run = _runs().get(_key(inputs.model, inputs.quantize, inputs.hardware.device))
    if run is None:
        return plan
    predicted = make_plan(replace(inputs, tokens=run["tokens"]))
    reading = run["prefill_s"] / predicted.ttft.seconds
    writing = run["token_s"] / predicted.chosen.tbt.seconds
    plain, chosen = (replace(each, tbt=_scaled(each.tbt, writing)) for each in (plan.plain, plan.chosen))
    return replace(plan, ttft=_scaled(plan.ttft, reading), plain=plain, chosen=chosen)


def _scaled(time: Time, factor: float) -> Time:
    return replace(time, seconds=factor * time.seconds)


def _key(model: str | None, quantize: str | None, device: str) -> str:
    return " ".join(filter(None, (model, quantize, device)))


def _runs() -> dict[str, dict[str, Any]]:
    """Return the runs by model, level of quantisation and device; empty where they cannot be read."""
    with suppress(OSError, ValueError, AttributeError):
        runs = json.loads((config_home(os.environ) / FILE).read_text("utf-8"))
        return {key: run for key, run in runs.items() if run.keys() == _FIELDS and min(run.values()) > 0}
    return {}
