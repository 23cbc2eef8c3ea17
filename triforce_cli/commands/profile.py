"""`triforce profile`: plans a model and a text on a hardware profile, or says which model is best: memory and speed."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import SettingsError
from offload.hardware import calibration, profiles
from offload.hardware.calibration import Measured
from offload.loading.hub.download import dimensions
from offload.settings.config import check_part
from offload.units import parse_tokens

from ..input.documents import read
from ..options import declarations as options
from ..options.settings import config_home, given_options
from ..output.plan_text import print_comparison, print_plan, recommendation_text
from ..output.terminal import Terminal
from ..run.measured_rates import load_measured, load_or_measure, measure_here, rates_text
from ..run.profile_plans import (
    CHARACTERS_A_TOKEN,
    LONGEST_DEFAULT,
    TEXT_FILE,
    PlanOptions,
    Target,
    find_target,
    hardware_of,
    plan_all_profiles,
    plan_target,
    recommended,
)

_DECODING = "method draft middle budget gamma1 gamma2 tree dtype quantize kv threads extend_context set verbose"
_ANSWER = 512  # tokens
_GPU = options.option(
    "--gpu",
    "--profile",
    help=options.described("A profile, a part of its name such as 4090, or a YAML file.", "auto: this machine"),
    metavar="NAME",
    autocompletion=options.complete_profile,
)
_CONTEXT = options.option(
    "--context",
    help=options.described("Prompt and answer in tokens, such as 128K.", "the book's, or the model's up to 128K"),
    parser=parse_tokens,
    metavar="TOKENS",
)
_MODEL = {"model": options.with_default("model", "the best one that is free to fetch")}


@options.accepts(_MODEL | options.chosen(f"{options.PLACEMENT} {_DECODING}"))
def profile(
    ctx: typer.Context,
    book: Annotated[str | None, typer.Argument(help="A text to plan for.", show_default=False)] = None,
    gpu: Annotated[str | None, _GPU] = None,
    context: Annotated[int | None, _CONTEXT] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine, and plan with the measured rates.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Save the measured rates for later plans.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="One table over all profiles.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The profile and its plan as one JSON object.")] = False,
) -> int:
    """Say which model is best for a book on your hardware, or whether one fits, and how fast it will be.

    Nothing is loaded: it works without the GPU and without the weights. Models are well-known names such as
    Qwen3-4B-2507, hub ids, folders and .gguf files. The last line is the command for the plan. Rates are the profile's;
    those of this machine are measured once, and by --measure --save again. -v prints the whole plan.

    [bold]Examples[/bold]

      triforce profile

      triforce profile book.txt --gpu 3060

      triforce profile --gpu 4090 --model Llama-2-7B-128K --context 128K

      triforce profile --gpu 2x4090 --model llama-2-13b-128k --memory 22GiB -v

      triforce profile --gpu 4090 --model Llama-3.1-8B --quantize q4

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
    if book is not None:
        characters = len(read(Path(book), terminal.stdin, terminal.warn))
        context = context or characters // CHARACTERS_A_TOKEN + _ANSWER
    target = find_target(gpu)
    asked = PlanOptions(flags, origins, context, bool(ctx.params["extend_context"]), book or TEXT_FILE)
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
    if "model" not in flags:
        wanted = asked.context or LONGEST_DEFAULT
        plans = recommended(target, asked, measured)
        if not json:
            terminal.print(recommendation_text(plans, terminal.table_width))
        found = {"model": plans[0].inputs.model} if plans else {}
        asked = replace(asked, flags=flags | found, context=plans[0].inputs.tokens if plans else None)
        if asked.context != wanted:
            terminal.note(f"{wanted:,} tokens at once take too long on this hardware; the plan is for one part of them")
    return print_plan(plan_target(target, asked, measured), "summarize", terminal, json, ctx.params["verbose"] or 0)


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
