"""`triforce experiment`: published tables and figures, planned or measured here, by one command each."""

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import PromptError, SettingsError
from offload.hardware.profile_file import is_path
from offload.settings.config import check_part

from ..bench import options as bench_options
from ..bench.options import is_given
from ..bench.plot import check_plot
from ..experiment.overrides import ExperimentRequest
from ..experiment.reproduce import list_text, listed, run_experiment
from ..experiment.shipped import available, load
from ..input.dataset import check_dataset
from ..input.documents import check_files
from ..options import declarations as options
from ..options.distinct_files import check_distinct, named_files
from ..options.settings import given_options
from ..output.output_files import check_file
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..signals import DONE

LIST = "list"
_NAMES = "model draft seed profile device dtype kernel quantize threads prefill_chunk extend_context quiet"
_SETTINGS = options.chosen(f"{_NAMES} {options.PLACEMENT}") | {
    "cache": bench_options.Cache,
    "model": options.with_default("model", "the experiment's"),
    "draft": options.with_default(
        "draft",
        "the experiment's",
        "Drafter: a model or head, lookup, none, self; for compare-drafters several, with commas.",
    ),
    "seed": options.with_default("seed", "0"),
}


def _complete_name(incomplete: str) -> list[str]:
    return [name for name in (LIST, *available()) if name.startswith(incomplete)]


@options.accepts(_SETTINGS)
def experiment(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help="An experiment, a YAML file, or list.", show_default=False, autocompletion=_complete_name),
    ] = LIST,
    quick: Annotated[bool, typer.Option("--quick", help="The embedded model and the example book.")] = False,
    prompt_file: options.PromptFiles = None,
    data: bench_options.Data = None,
    points: bench_options.Points = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report there.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw what was measured: a.png.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan; load nothing.")] = False,
) -> int:
    """Reproduce a table or figure of a paper: published values beside planned or measured ones, in Markdown.

    An experiment measures with the paper's model and settings, as `triforce bench` does; with --quick on the embedded
    model and the example book, in minutes on two cores, which shows the shape of a result and not its numbers. Values
    of hardware that is not here are planned, and marked so. --model, --draft and --profile run or plan it elsewhere.

    [bold]Examples[/bold]

      triforce experiment list

      triforce experiment off-chip

      triforce experiment off-chip --profile rtx-3090

      triforce experiment temperature --quick --output temperature.md --plot temperature.png

      triforce experiment attention --quick --json > attention.json

      triforce experiment budget --model Llama-3.1-8B -f book.txt --points runs.jsonl
    """
    terminal, quiet = ctx.obj.terminal, bool(ctx.params["quiet"])
    if name == LIST:
        given = {"--quick": quick, "--prompt-file": prompt_file, "--data": data, "--points": points, "--plot": plot}
        _check_list({**given, "--output": output, "--dry-run": dry_run})
        if json:
            terminal.write(json_line(type="experiments", experiments=listed()))
        else:
            terminal.print(list_text(listed(), terminal.table_width))
        return DONE
    asked = load(name)
    flags, origins = given_options(ctx)
    check_part(flags)
    check_files(prompt_file or [])
    if data is not None:
        check_dataset(data)
    if data is not None and prompt_file:
        raise PromptError("--data takes its prompts from a data set alone", "leave --prompt-file out")
    _check(asked.bench is not None and not dry_run, {"--quick": quick, "--plot": plot, "--points": points})
    inputs = [("", name if is_path(name) else None), *(("--prompt-file", each) for each in prompt_file or [])]
    check_distinct([*inputs, *named_files(ctx)], [("--output", output), ("--points", points), ("--plot", plot)])
    if output is not None:
        check_file(output, "--output", "report.md")
    if plot is not None:
        check_plot(plot)
    if asked.bench is not None and not (quick or dry_run or prompt_file or data):
        hint = "give a text that is long enough with --prompt-file or --data, or try --quick, or plan with --dry-run"
        raise PromptError("the example book is for quick runs, and this one needs a text", hint)
    profile = ctx.params["profile"]
    request = ExperimentRequest(
        asked,
        flags,
        origins,
        profile,
        ctx.obj.home,
        plan_for=profile if is_given(ctx, "profile") else None,
        files=prompt_file or [],
        extend_context=bool(ctx.params["extend_context"]),
        command=_command(),
        **{
            name: ctx.params[name] for name in ("quick", "dry_run", "points", "output", "plot", "quiet", "data", "json")
        },
    )
    with closing(ProgressDisplay(terminal, shown=not quiet)) as display:
        display.loading("starting")
        return run_experiment(request, terminal, display)


def _check(measures: bool, given: dict[str, object]) -> None:
    """Raise SettingsError for options of a measurement where nothing is measured."""
    for option, value in given.items():
        if value and not measures:
            raise SettingsError(f"{option} is for what is measured, and all is planned here", f"leave {option} out")


def _check_list(given: dict[str, object]) -> None:
    """Raise SettingsError for options of an experiment beside `list`."""
    for option, value in given.items():
        if value:
            raise SettingsError(
                f"{option} is for one experiment, and these are listed", f"name one, or leave {option} out"
            )


def _command() -> str:
    return shlex.join(["triforce", *sys.argv[1:]])
