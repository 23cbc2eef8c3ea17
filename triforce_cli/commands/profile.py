"""`triforce profile`: lists the hardware profiles, and plans a model on one: memory, speed, and a command."""

import os
from typing import Annotated

import typer
from rich.text import Text

from offload.errors import SettingsError
from offload.hardware import calibration, profiles
from offload.hardware.calibration import Measured
from offload.hardware.profiles import Profile
from offload.loading.hub.download import dimensions
from offload.settings.config import DEFAULT_MODEL, check_part
from offload.units import parse_tokens

from ..options import declarations as options
from ..options.settings import config_home, given_options
from ..output.plan_text import print_comparison, print_plan
from ..output.tables import Column, table
from ..output.terminal import Terminal
from ..run.measured_rates import load_measured, load_or_measure, measure_here, rates_text
from ..run.profile_plans import (
    DEFAULT_GPU_MODEL,
    PlanOptions,
    Target,
    find_target,
    hardware_of,
    plan_all_profiles,
    plan_target,
)

_DECODING = "method draft middle budget gamma1 gamma2 tree dtype quantize kv threads extend_context set"
_GPU = options.option(
    "--gpu",
    "--profile",
    help=options.described("A profile, a part of its name such as 4090, or a YAML file.", "auto: this machine"),
    metavar="NAME",
    autocompletion=options.complete_profile,
)
_CONTEXT = options.option(
    "--context",
    help=options.described("Prompt and answer in tokens, such as 128K.", "the model's, 128K at most"),
    parser=parse_tokens,
    metavar="TOKENS",
)
_MODEL = {"model": options.with_default("model", f"{DEFAULT_MODEL} on a CPU, {DEFAULT_GPU_MODEL} on a GPU")}


@options.accepts(_MODEL | options.chosen(f"{options.PLACEMENT} {_DECODING}"))
def profile(
    ctx: typer.Context,
    gpu: Annotated[str | None, _GPU] = None,
    context: Annotated[int | None, _CONTEXT] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine, and plan with the measured rates.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Save the measured rates for later plans.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="One table over all profiles.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The profile and its plan as one JSON object.")] = False,
) -> int:
    """List the hardware profiles, and plan a model and a context for one: memory use and predicted speed.

    Nothing is loaded: it works without the GPU and without the weights. Models are well-known names such as
    Llama-2-7B-128K, hub ids, folders and .gguf files. The last line is the command for the plan, with book.txt for your
    text. Rates are the profile's; those of this machine are measured once, and by --measure --save again.

    [bold]Examples[/bold]

      triforce profile

      triforce profile --gpu 4090 --model Llama-2-7B-128K --context 128K

      triforce profile --gpu 2x4090 --model llama-2-13b-128k --memory 22GiB

      triforce profile --gpu 4090 --model Llama-3.1-8B --quantize q4

      triforce profile --gpu cpu --model Llama-3.1-8B --kv q8

      triforce profile --compare --model Llama-3.1-70B

      triforce profile --gpu my-machine.yaml --json

      triforce profile --measure --save
    """
    terminal = ctx.obj.terminal
    flags, origins = given_options(ctx)
    check_part(flags)
    if save and not measure:
        raise SettingsError("--save needs --measure", "use --measure --save")
    if compare and gpu is not None:
        raise SettingsError(f"--compare is a table of all profiles, and --gpu {gpu} is one", "leave out one of the two")
    target = find_target(gpu)
    asked = PlanOptions(flags, origins, context, bool(ctx.params["extend_context"]))
    if "model" in flags:
        dimensions(flags["model"])  # an unknown model is an error before anything is measured
    measured: Measured | None
    if measure:
        measured = _measure(target, terminal, json, save, flags.get("disk"))
    elif compare or target.name != profiles.AUTO:
        measured = load_measured(terminal)
    else:
        measured = load_or_measure(bool(target.found), terminal, flags.get("disk"))
    if compare:
        return print_comparison(plan_all_profiles(target.found, asked, measured), terminal, json)
    if gpu is None and not measure and not json:
        terminal.print(_list(target.profile, terminal.table_width))
    report = plan_target(target, asked, measured)
    return print_plan(report, "generate", terminal, json)


def _measure(target: Target, terminal: Terminal, json: bool, save: bool, disk: str | None) -> Measured:
    """Measure this machine's rates, print them beside the profile's, and save them if asked to; return them."""
    sheet = target.profile
    measured = measure_here(sheet, target.found, terminal, disk)
    if not json:
        hardware = None
        if sheet is not None and (sheet.device == "cpu" or (sheet.gpu and sheet.link)):
            hardware = hardware_of(sheet, target.found)
        terminal.write(rates_text(measured, sheet, hardware))
    if save:
        terminal.note(f"saved to {calibration.save(measured, config_home(os.environ))}")
    return measured


def _list(chosen: Profile | None, width: int | None) -> Text:
    """Return a line for each profile, the chosen one marked."""
    marked = None if chosen is None else chosen.name
    names = profiles.available()
    rows = [(f"{'*' if name == marked else ' '} {name}", profiles.load(name).description) for name in names]
    columns = (Column("", style="cyan"), Column("", least=16))
    legend = "* chosen for this machine\n\n" if marked in names else "\n"
    return table(columns, rows, width, headed=False).append(legend)
