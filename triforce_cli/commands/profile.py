"""`triforce profile`: which profiles there are, and the plan for one: memory, speed, and the flags for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from offload.architecture.known import PlanShape, shape_of
from offload.config import DEFAULT_MODEL, check_part
from offload.errors import ModelNotFound, PromptError, SettingsError
from offload.hardware import profiles
from offload.hardware.calibration import Measured, applied, profile_of_found
from offload.hardware.driver import gpu_names
from offload.hardware.profiles import Profile, same_gpu
from offload.hardware.rates import Hardware, describe
from offload.planning.plan import Plan, suggested_budget
from offload.system import cores, free_host_memory
from offload.units import counted

from ..exit_codes import DONE
from ..options import declarations as options
from ..options import groups as option_groups
from ..options.context import given
from ..options.settings import Settings, resolve_with
from ..output.plan import comparison_text
from ..output.renderers import json_line
from ..output.terminal import Terminal
from ..run.calibration import measure_here, rates_text, save, saved
from ..run.planning import plan_fields, plan_with_ways, rates, request_for, tell

DEFAULT_GPU_MODEL = "Llama-3.1-8B"
LONGEST_DEFAULT = 128 * 1024  # tokens
_DECODING = {
    "method": options.Method,
    "draft": options.Draft,
    "budget": options.Budget,
    "chunk": options.Chunk,
    "gamma1": options.Gamma1,
    "gamma2": options.Gamma2,
    "dtype": options.Dtype,
    "prefill_chunk": options.PrefillChunk,
}


@option_groups.accepts(option_groups.PLACEMENT | _DECODING)
def profile(
    ctx: typer.Context,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="A profile's name, a part of it such as 4090, or a YAML file; auto is what is found.",
            show_default="auto",
            autocompletion=options._complete_profile,
        ),
    ] = None,
    model: options.Model = None,
    context: options.ContextLength = None,
    measuring: Annotated[
        bool, typer.Option("--measure", help="Measure this machine, and plan with what it really does.")
    ] = False,
    saving: Annotated[
        bool, typer.Option("--save", help="Keep what --measure measures, for all plans to come.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="One table over all profiles.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The profile and its plan as one JSON object.")] = False,
) -> int:
    """List the hardware profiles, and plan a model and a context for one: what lies where, how fast it will be.

    Nothing is loaded: it works without the GPU and without the weights. Models are well-known names such as
    Llama-2-7B-128K, or folders with a config.json. The last line is the command that the plan stands for. Rates are the
    profile's, or those that --measure --save has found on this machine.

    [bold]Examples[/bold]

      triforce profile

      triforce profile --gpu 4090 --model Llama-2-7B-128K --context 128K

      triforce profile --gpu 2x4090 --model llama-2-13b-128k --memory 22GiB

      triforce profile --compare --model Llama-3.1-70B

      triforce profile --gpu my-machine.yaml --json

      triforce profile --measure --save
    """
    terminal = ctx.obj.terminal
    flags, origins = given(ctx)
    check_part(flags)
    if saving and not measuring:
        raise SettingsError("--save keeps what --measure measures", "use --measure --save")
    found = gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"))
    automatic = gpu is None or gpu.lower() == profiles.AUTO
    chosen = profiles.matching(found) if automatic else profiles.load(gpu)
    if "model" in flags:
        shape_of(flags["model"])  # a wrong one is told before anything is measured
    measured = _measure(chosen, found, terminal, json, saving) if measuring else saved(terminal)
    if compare:
        return _compare(flags, origins, context, found, measured, terminal, json)
    if gpu is None and not measuring and not json:
        _list(terminal, chosen)
    chosen = chosen or profile_of_found(found, measured)
    if chosen is None:
        raise profiles.undescribed(found)
    rated = applied(chosen, measured, found)
    hardware = _machine(rated, found)
    if chosen.name not in profiles.available():  # a file is found by its path, what was only measured by looking
        hardware = replace(hardware, name=profiles.AUTO if automatic else gpu)
    plan, ways = _plan(resolve_with(flags, origins, chosen), context, hardware, chosen.device == "cuda")
    return tell(plan, ways, terminal, chosen, measured if rated is not chosen else None, json)


def _measure(chosen: Profile | None, found: Sequence[str], terminal: Terminal, json: bool, saving: bool) -> Measured:
    """This machine's rates, shown beside the profile's and kept if that is wished."""
    measured = measure_here(chosen, found, terminal)
    if not json:
        knows_gpu = chosen is not None and (chosen.device == "cpu" or (chosen.gpu and chosen.link))
        terminal.write(rates_text(measured, chosen, _machine(chosen, found) if knows_gpu else None))
    if saving:
        save(measured, terminal)
    return measured


def _list(terminal: Terminal, chosen: Profile | None) -> None:
    names = profiles.available()
    width = max(map(len, names))
    for name in names:
        mark = "*" if chosen is not None and chosen.name == name else " "
        terminal.write(f"{mark} {name:<{width}}  {profiles.load(name).description}\n")
    terminal.write("\n")


def _machine(chosen: Profile, found: Sequence[str]) -> Hardware:
    """The profile's hardware; what it does not say of the host is this machine's, if it is about this machine."""
    model = None if chosen.gpu is None else chosen.gpu.model
    count = sum(model is not None and same_gpu(name, model) for name in found)
    here = chosen.device == "cpu" or 0 < chosen.gpus <= count
    return describe(chosen, free_host_memory(), cores()) if here else describe(chosen)


def _plan(settings: Settings, context: int | None, hardware: Hardware, on_gpu: bool) -> tuple[Plan, tuple]:
    """The plan that the settings ask for, of the usual model where they name none."""
    asked = settings.values.get("model", DEFAULT_GPU_MODEL if on_gpu else DEFAULT_MODEL)
    _, shape = shape_of(asked)
    tokens = min(shape.context, LONGEST_DEFAULT) if context is None else context
    if tokens > shape.context:
        raise PromptError(
            f"a context of {counted(tokens, 'token')} exceeds the {shape.context:,} of {asked}",
            f"use --context {shape.context} or less, or --model with a longer context",
        )
    speculation = settings.speculation
    if "budget" not in settings.values:
        speculation = replace(speculation, budget=max(suggested_budget(tokens), 4 * speculation.chunk))
    settings = replace(settings, engine=replace(settings.engine, model=asked), speculation=speculation)
    return plan_with_ways(request_for(settings, shape, tokens, hardware, _draft(settings)))


def _draft(settings: Settings) -> PlanShape | None:
    name = settings.speculation.draft_model
    try:
        return None if name is None else shape_of(name)[1]
    except ModelNotFound as error:
        raise ModelNotFound(f"the draft model: {error.message}", error.hint) from error


def _compare(
    flags: Mapping[str, Any],
    origins: Mapping[str, str],
    context: int | None,
    found: Sequence[str],
    measured: Measured | None,
    terminal: Terminal,
    json: bool,
) -> int:
    """The plans for all profiles, those of this machine's hardware with its measured rates."""
    chosen = [profiles.load(name) for name in profiles.available()]
    rated = [applied(each, measured) for each in chosen]
    plans = [_plan(resolve_with(flags, origins, each), context, _machine(each, found), True) for each in rated]
    here = [each.name for each, before in zip(rated, chosen, strict=True) if each is not before]
    if json:
        fields = [plan_fields(plan, ways) for plan, ways in plans]
        terminal.write(json_line(type="comparison", measured=rates(measured if here else None), plans=fields))
        return DONE
    if measured is not None and here:
        terminal.write(f"measured   on {measured.date}: the rates of {', '.join(here)}, of {measured.machine}\n")
    terminal.write(comparison_text([plan for plan, _ in plans]))
    return DONE
