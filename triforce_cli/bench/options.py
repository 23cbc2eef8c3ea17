"""The options of `bench`: those of its own, and lists in place of single settings. Imports nothing heavy."""

from collections.abc import Callable
from copy import copy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from offload.errors import SettingsError
from offload.settings.config import Sampling
from offload.units import parse_tokens

from ..options import declarations as options
from .axes import AXES, Values, parse_context, parse_list
from .compared import CHANGED, DEFAULT

NEW_TOKENS = 128
STDOUT = Path("-")  # as the name of a file to write
LAST, NEEDLES = 256, 5  # of --quality
QUALITY, GRID = "Quality", "Lists of settings"
_QUALITY = ("modes", "last", "needles")
_GRID = ("excerpts", "each_file", "data", "points", "csv", "cache")
_NOT_OF_LADDER = ("quality", "batch", "context", "plot", "excerpts", "data", "cache")
_SPEED = ("methods", "batch", "repeats", "draft", "tree", "tree_sampling", "rebuild_every", "gamma1", "gamma2", "seed")
_SPEED += (*(field.name for field in fields(Sampling)), *CHANGED, *_GRID, *options.FORMS, "ladder", "page", "peers")


def _listed(option: Any, parse: Callable[[str], Any], name: str) -> Any:
    """Return an option that takes several values with commas, in place of one that takes a single one."""
    info = copy(get_args(option)[1])
    info.parser, info.metavar = partial(parse_list, parse=parse, name=name), f"{info.metavar},..."
    info.parser.__name__ = name  # typer reads it
    return Annotated[Any, info]


_quality, _grid = (partial(options.option, rich_help_panel=panel) for panel in (QUALITY, GRID))

Methods = Annotated[
    str | None, options.option(metavar="LIST", help=options.described("Methods, with commas.", DEFAULT))
]
Batch = Annotated[str | None, options.option(metavar="LIST", help="Sequences together, such as 1,2,4,8.")]
_FIRST = options.described("Use the first tokens: 8000, 16K.", "all")
Context = Annotated[Any, options.option(help=_FIRST, parser=parse_context, metavar="N,...")]
_TOKENS = options.described("Tokens to generate.", str(NEW_TOKENS))
_NEW = options.option("--new", "--max-new-tokens", "-n", metavar="N", help=_TOKENS)
MaxNewTokens = _listed(Annotated[int | None, _NEW], int, "new")
Repeats = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Runs of each method.")]
JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object, with all samples.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw tokens per second, or all pairs: a.png.", metavar="FILE")
]
Excerpts = Annotated[
    int | None, _grid("--prompts", min=1, max=1000, metavar="N", help="Excerpts of the text, each a prompt.")
]
EachFile = Annotated[bool, _grid("--each-file", help="Each file is a prompt.")]
Data = Annotated[
    str | None, _grid("--data", metavar="SOURCE", help="Folder, JSON lines or hub data set: each text a prompt.")
]


def _lengths(text: str) -> Any:
    return parse_context(text, "ladder")


Ladder = Annotated[
    Any, options.option("--ladder", metavar="N,...", parser=_lengths, help="All methods at these lengths.")
]
Page = Annotated[
    Path | None, options.option("--page", metavar="FILE", help="Of --ladder: a page with pictures, ladder.html.")
]
Peers = Annotated[
    str | None,
    options.option(metavar="LIST", help="Of --ladder: other programs beside it: transformers, llama.cpp, URLs."),
]
Points = Annotated[Path | None, _grid("--points", metavar="FILE", help="Keep finished runs; resume from them.")]
Csv = Annotated[Path | None, _grid("--csv", metavar="FILE", help="Write a table for other programs.")]
Cache = Annotated[
    bool | None,
    _grid("--cache/--no-cache", envvar="TRIFORCE_CACHE", show_envvar=False, help="Keep the prompts' KV on disk."),
]
Quality = Annotated[bool, _quality("--quality", help="Compare the answers of lossy modes.")]
_MODES = options.described("Modes, with commas.", DEFAULT)
Modes = Annotated[str | None, _quality("--modes", metavar="LIST", help=_MODES)]
_LAST = options.described("Tokens to score.", str(LAST))
Last = Annotated[int | None, _quality("--last", metavar="N", help=_LAST, parser=parse_tokens)]
_NEEDLES = options.described("Texts with a needle to find.", str(NEEDLES))
Needles = Annotated[int | None, _quality("--needles", min=0, max=100, metavar="N", help=_NEEDLES)]

# The settings, which `settings.given_options` reads from the context; those in AXES may be lists.
SETTINGS = options.chosen(
    "model max_new_tokens quiet temperature top_p top_k min_p repetition_penalty seed draft middle budget "
    "gamma1 gamma2 tree extend_context profile device dtype kernel quantize kv "
    f"threads {options.PLACEMENT} tensor_parallel set dry_run cache"
)
SETTINGS |= {"max_new_tokens": MaxNewTokens, "cache": Cache}
SETTINGS |= {name: each for name, each in options.FORMS.items() if name != "quote"}
SETTINGS |= {
    name: _listed(SETTINGS[name], axis.parse, axis.title)
    for name, axis in AXES.items()
    if name in SETTINGS and name != "max_new_tokens"
}


def check_kind(ctx: typer.Context) -> None:
    """Raise SettingsError for options that the kind of benchmark does not read, or of which it takes no list."""
    _check_ladder(ctx)
    is_quality = ctx.params["quality"]
    unread, other = (_SPEED, "without") if is_quality else (_QUALITY, "with")
    for param in ctx.command.params:
        if param.name in unread and is_given(ctx, param.name):
            raise SettingsError(
                f"{param.opts[0]} has no effect {'with' if is_quality else 'without'} --quality",
                f"leave it out, or run the benchmark {other} --quality",
            )
    for name, value in ctx.params.items() if is_quality else ():
        if isinstance(value, Values):
            raise SettingsError(f"{AXES[name].option} {value} is a list, and --quality takes one", "give one of them")


def _check_ladder(ctx: typer.Context) -> None:
    """Raise SettingsError for options that the ladder decides itself, and for those that are its alone."""
    is_ladder = ctx.params["ladder"] is not None
    for param in ctx.command.params:
        name = str(param.name)
        if is_ladder and name in _NOT_OF_LADDER and is_given(ctx, name):
            raise SettingsError(f"{param.opts[0]} does not go with --ladder", "leave one of them out")
        if is_ladder and name != "temperature" and isinstance(ctx.params.get(name), Values) and name != "ladder":
            raise SettingsError(f"{param.opts[0]} takes one value with --ladder", "give one of them")
    for name in ("page", "peers"):
        if not is_ladder and ctx.params[name] is not None:
            raise SettingsError(f"--{name} is of --ladder", "give --ladder 4K,8K, or leave it out")


def is_grid(ctx: typer.Context) -> bool:
    """Return whether lists, several prompts, or what goes with them is asked for: not by --no-cache or --prompts 1."""
    if ctx.params["ladder"] is not None:
        return False
    has_lists = any(isinstance(value, Values) for value in ctx.params.values())
    usual = {"cache": False, "excerpts": 1}
    asked = (name for name in _GRID if is_given(ctx, name) and ctx.params[name] != usual.get(name))
    return has_lists or any(asked)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line itself."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
