"""The options that commands share, a row each, and a decorator that adds them; the dataclasses have the defaults.

Settings that few people change have no option of their own: `--set NAME=VALUE`, their environment variable and
config.yaml give them.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial, wraps
from typing import Annotated, Any, NamedTuple, get_args

import typer

from offload.errors import SettingsError
from offload.settings.config import DEVICES, DRAFTS, DTYPES, KERNELS, METHODS, QUANTIZE
from offload.settings.kv_formats import LOSSY_KV, full_formats
from offload.settings.methods import APPROXIMATIONS, MIDDLES
from offload.settings.parse import DEFAULTS, parse_setting
from offload.settings.placement_settings import EXPERTS, OFFLOADS
from offload.short_repr import short_repr

AUTO = "auto"
THINK = ("on", "off", AUTO)  # values of --think
PLACEMENT = "offload memory host_memory resident_layers link_gb_s experts disk"
SAMPLING, SPECULATION, CONTEXT = "Sampling", "Speculative decoding", "Prompt and prompt cache"
FORM, MEMORY, MACHINE, BATCH = "Form of the answer", "Memory and offloading", "Machine", "Many prompts"
CLUSTER: dict[str, Any] = {
    "metavar": "ADDRESS",
    "help": "Run on a Ray cluster: local, auto, or host:port.",
    "among": ("local", AUTO),
}
_MOST_PARALLEL = 1024


def parse_parallel(text: str | int) -> int | str:
    """Return a number of sequences, or "auto". Raises SettingsError."""
    given = str(text).strip().lower()
    if given == AUTO:
        return AUTO
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= _MOST_PARALLEL:
        hint = f"give a number of sequences from 1 to {_MOST_PARALLEL:,}, or auto"
        raise SettingsError(f"--parallel is {short_repr(text)}", hint)
    return int(given)


def described(help: str, default: str) -> str:
    """Return the help of an option with its default, short enough for one line."""
    return f"{help} [dim]({default})[/dim]"


def option(*names: str, among: Sequence[str] = (), **more: Any) -> Any:
    """Return an option whose help does not show its default by itself; `among` completes its values."""
    if among:
        more["autocompletion"] = lambda incomplete: [name for name in among if name.startswith(incomplete)]
    if names and "parser" in more:
        more["parser"] = _naming(more["parser"], names[0])
    return typer.Option(*names, **{"show_default": False} | more)


def _naming(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """Return a parser whose errors name the option."""

    @wraps(parse)
    def parser(text: str) -> Any:
        try:
            return parse(text)
        except SettingsError as error:
            named = "" if error.message.startswith((name, name.lstrip("-"))) else f"{name}: "
            raise SettingsError(f"{named}{error.message}", error.hint) from None

    return parser


def _complete_model(incomplete: str) -> list[str]:
    from offload.loading.hub.bundled import EMBEDDED
    from offload.loading.hub.registry import HUB_MODELS

    names = (*EMBEDDED, *(name for name, model in HUB_MODELS.items() if not model.is_for_plans))
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_profile(incomplete: str) -> list[str]:
    from offload.hardware.profiles import available

    return [name for name in available() if name.startswith(incomplete)]


class _Row(NamedTuple):
    """An option: its help, its default in words ("": the dataclass's), and its flags, with blanks between.

    Without a `kind`, it is a setting: its parameter's name is that of the dataclass's field, which has its type, and
    an environment variable gives it too. Other options with `has_variable` have one as well. `among` are its values.
    """

    help: str
    default: str = ""
    flags: str = ""
    metavar: str | None = "N"
    kind: Any = None
    has_variable: bool = False
    among: Sequence[str] = ()
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def declared(self, name: str, panel: str | None) -> Any:
        """Return the annotation of the parameter `name`, in a panel of the help."""
        more: dict[str, Any] = {"rich_help_panel": panel, "show_envvar": False, "metavar": self.metavar, **self.more}
        default = self.default or (str(DEFAULTS[name]) if self.kind is None else "")
        more["help"] = described(self.help, default) if default else self.help
        if self.kind is None or self.has_variable:
            more["envvar"] = f"TRIFORCE_{name.upper()}"
        if self.kind is None:
            more["parser"] = partial(parse_setting, name)
        flags = self.flags.split() or [f"--{name.replace('_', '-')}"]
        return Annotated[self.kind or str | None, option(*flags, among=self.among, **more)]


def _switch(help: str) -> _Row:
    return _Row(help, metavar=None, kind=bool)


def _text(help: str, metavar: str = "TEXT", **more: Any) -> _Row:
    return _Row(help, metavar=metavar, kind=str | None, **more)


def _name(help: str, among: Sequence[str], default: str = "") -> _Row:
    return _Row(help, default, metavar="NAME", among=tuple(among))


_MODELS = "model's"  # default
_FORMATS = f"Format of KV: auto, bf16, packed; {', '.join(LOSSY_KV)} is lossy."
_PROFILE: dict[str, Any] = {
    "default": "found",
    "flags": "--gpu --profile",
    "has_variable": True,
    "more": {"autocompletion": complete_profile},
}
_TABLE: dict[str | None, dict[str, _Row]] = {  # by panels; `--help` shows the options that have none
    None: {
        "model": _Row("Name, hub id or path.", "", "--model -m", "MODEL", more={"autocompletion": _complete_model}),
        "max_new_tokens": _Row("Most tokens to generate.", "", "--max-new-tokens -n"),
        "temperature": _Row("0 is greedy, 1 is varied.", _MODELS, metavar="X"),
        "profile": _text("Hardware profile, or YAML file.", "NAME", **_PROFILE),
        "dry_run": _switch("Print the plan and stop."),
        "json": _switch("JSON lines instead of text."),
        "quiet": _switch("No progress, notes or statistics.")._replace(flags="--quiet -q"),
        "verbose": _Row("More statistics; -vv: all settings.", "", "--verbose -v", "", int, more={"count": True}),
    },
    SAMPLING: {
        "seed": _Row("The same seed gives the same text.", "random"),
        "top_p": _Row("Sample from the likeliest tokens of this total.", _MODELS, metavar="X"),
        "top_k": _Row("Sample from this many likeliest tokens.", _MODELS),
        "min_p": _Row("Drop tokens below X times the likeliest one.", _MODELS, metavar="X"),
        "repetition_penalty": _Row("Above 1: repeat less.", _MODELS, metavar="X"),
        "stop": _Row("End before this text; repeatable.", metavar="TEXT", kind=list[str] | None),
    },
    SPECULATION: {
        "method": _name("Decoding method; all are lossless.", METHODS),
        "draft": _Row("lookup, none, mtp, a draft model or an EAGLE-3 head.", metavar="MODEL", among=DRAFTS),
        "middle": _name(f"Cache of the middle level: {', '.join(MIDDLES)}.", tuple(MIDDLES), "the method's"),
        "budget": _Row("Tokens in the cache of the middle level.", "3 %"),
        "gamma2": _Row("Tokens to draft for each verification.", "adaptive"),
        "tree": _Row("Draft a tree: N nodes, auto, or k-ary:2x3x1.", metavar="TREE", among=("chain", "auto", "k-ary:")),
        "verify": _switch("Check the text against plain decoding."),
    },
    CONTEXT: {
        "system": _text("System message."),
        "raw": _switch("Use no chat template."),
        "think": _text("Let a reasoning model think first.", "on|off", default=AUTO, has_variable=True, among=THINK),
        "show_thinking": _switch("Write the thoughts to stdout, too."),
        "extend_context": _switch("Extend the model's context by YaRN."),
        "cache": _Row("Keep prompts on disk.", "long ones", "--cache/--no-cache", None, bool | None, True),
        "truncate": _text(
            "Drop this part of a text beyond the context: start, middle, end.", "PART", among=("start", "middle", "end")
        ),
    },
    MEMORY: {
        "memory": _Row("Most device memory to use: 22GiB.", "free", metavar="SIZE"),
        "offload": _name("none, stream, host, hybrid or planes.", OFFLOADS),
        "host_memory": _Row("Most host memory to use: 64GiB.", "free", metavar="SIZE"),
        "resident_layers": _Row("Layers whose KV stays on the device.", "most that fit"),
        "link_gb_s": _Row("Simulate a GPU's link on a CPU.", "no", "--link", "GB/S"),
        "experts": _name("Where experts lie: device or host.", EXPERTS),
        "disk": _Row("Folder for KV beyond host memory.", "none", metavar="PATH"),
        "approximate": _name(f"Forget tokens (lossy): {', '.join(APPROXIMATIONS)}.", tuple(APPROXIMATIONS), "no"),
        "kv": _name(_FORMATS, full_formats()),
    },
    MACHINE: {
        "device": _name("cpu or cuda.", DEVICES),
        "dtype": _name("bfloat16, float16 or float32.", DTYPES),
        "kernel": _name("Level of the CPU kernel, or off.", KERNELS),
        "quantize": _name("Round the weights: q4, q5, q6, q8.", QUANTIZE, "no"),
        "threads": _Row("CPU threads.", "all cores"),
        "tensor_parallel": _Row("GPUs that share the model.", "profile's"),
        "set": _Row("Any other setting (docs/options.md); repeatable.", "", "", "NAME=VALUE", list[str] | None),
    },
    FORM: {
        "json_schema": _text("The answer is JSON of this schema.", "FILE|JSON"),
        "regex": _text("The answer matches this regular expression."),
        "grammar": _text("The answer follows this Lark or GBNF grammar.", "FILE"),
        "quote": _switch("Text in quotation marks is in the document."),
        "choices": _text("The answer is one of these.", "A,B,C"),
    },
}
READING = {name: row.declared(name, panel) for panel, rows in _TABLE.items() for name, row in rows.items()}
FORMS = {name: READING[name] for name in _TABLE[FORM]}  # of an answer: of commands that read documents once
GENERATION = {name: kind for name, kind in READING.items() if name not in {*FORMS, "truncate"}}

PromptFiles = Annotated[
    list[str] | None, option("--prompt-file", "-f", metavar="FILE", help="Read a file; repeatable; - is stdin.")
]


def chosen(names: str) -> dict[str, Any]:
    """Return the options of these names, with blanks between."""
    return {name: READING[name] for name in names.split() if name in READING}


def with_default(name: str, default: str, help: str = "") -> Any:
    """Return an option with another description of its default, and perhaps another help."""
    kind, info = get_args(READING[name])
    info = copy(info)
    info.help = described(help or info.help.partition(" [dim]")[0], default)
    return Annotated[kind, info]


def accepts(options: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command, which reads them from its context and not as arguments."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*args: Any, **kwargs: Any) -> Any:
            return command(*args, **{name: value for name, value in kwargs.items() if name not in options})

        run: Any = wraps(command)(reading)
        own = inspect.signature(command, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(name, kind, default=False if option.__origin__ is bool else None, annotation=option)
            for name, option in options.items()
        ]
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
        run.__annotations__ = {param.name: param.annotation for param in run.__signature__.parameters.values()}
        return run

    return decorate
