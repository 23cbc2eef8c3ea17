"""The options that commands share, a row each, and a decorator that adds them; the dataclasses have the defaults.

Settings that few people change have no option of their own: `--set NAME=VALUE`, their environment variable and
config.yaml give them.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial, wraps
from typing import Annotated, Any, get_args

import typer

from offload.errors import SettingsError
from offload.settings.config import DEVICES, DRAFTS, DTYPES, KERNELS, METHODS, QUANTIZE
from offload.settings.kv_formats import LOSSY_KV, full_formats
from offload.settings.methods import APPROXIMATIONS, MIDDLES
from offload.settings.parse import DEFAULTS, parse_assignment, parse_setting
from offload.settings.placement_settings import EXPERTS, OFFLOADS
from offload.short_repr import short_repr

AUTO = "auto"
_MOST_PARALLEL = 1024
CLUSTER: dict[str, Any] = {
    "metavar": "ADDRESS",
    "help": "Run on a Ray cluster: local, auto, or host:port.",
    "among": ("local", AUTO),
}


def parse_parallel(text: str | int) -> int | str:
    """Return a number of sequences, or "auto". Raises SettingsError."""
    given = str(text).strip().lower()
    if given == AUTO:
        return AUTO
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= _MOST_PARALLEL:
        hint = f"give a number of sequences from 1 to {_MOST_PARALLEL:,}, or auto"
        raise SettingsError(f"--parallel is {short_repr(text)}", hint)
    return int(given)


SAMPLING, SPECULATION, CONTEXT = "Sampling", "Speculative decoding", "Prompt and prompt cache"
FORM = "Form of the answer"
MEMORY, MACHINE, BATCH = "Memory and offloading", "Machine", "Many prompts"
THINK = ("on", "off", AUTO)  # values of --think
_MODELS = "model's"  # default

_Make = Callable[[str, str | None], Any]  # of a name and the panel of the help that it stands in


def described(help: str, default: str) -> str:
    """Return the help of an option with its default, short enough for one line."""
    return f"{help} [dim]({default})[/dim]"


def option(*names: str, among: Sequence[str] = (), **rest: Any) -> Any:
    """Return an option whose help does not show its default by itself; `among` completes its values."""
    completion = {"autocompletion": _complete_from(*among)} if among else {}
    if names and "parser" in rest:
        rest["parser"] = _naming(rest["parser"], names[0])
    return typer.Option(*names, **{"show_default": False} | completion | rest)


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


def _setting(help: str, default: str | None = None, *names: str, metavar: str = "N", **rest: Any) -> _Make:
    """Return what makes an option with the setting's flag and environment variable.

    `default` describes its default, else it is shown; `names` are its flags, if not the setting's name.
    """

    def make(name: str, panel: str | None) -> Any:
        shown: dict[str, Any] = {"show_envvar": False, "rich_help_panel": panel, "metavar": metavar}
        shown |= {"help": described(help, default or str(DEFAULTS[name])), "envvar": f"TRIFORCE_{name.upper()}"}
        shown["parser"] = partial(parse_setting, name)
        return Annotated[str | None, option(*(names or (f"--{name.replace('_', '-')}",)), **shown | rest)]

    return make


def _switch(*names: str, help: str, envvar: str | None = None) -> _Make:
    def make(name: str, panel: str | None) -> Any:
        shown: dict[str, Any] = {"show_envvar": False, "show_default": False, "rich_help_panel": panel}
        return Annotated[bool | None if envvar else bool, typer.Option(*names, help=help, envvar=envvar, **shown)]

    return make


def _other(kind: Any, *names: str, **rest: Any) -> _Make:
    """Return what makes an option that is no setting with an environment variable."""
    return lambda name, panel: Annotated[kind, option(*names, rich_help_panel=panel, **rest)]


_size = partial(_setting, metavar="SIZE")
_number, _name = partial(_setting, metavar="X"), partial(_setting, metavar="NAME")


def _complete_model(incomplete: str) -> list[str]:
    from offload.loading.hub.bundled import EMBEDDED
    from offload.loading.hub.registry import HUB_MODELS

    names = (*EMBEDDED, *(name for name, model in HUB_MODELS.items() if not model.is_for_plans))
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_profile(incomplete: str) -> list[str]:
    from offload.hardware.profiles import available

    return [name for name in available() if name.startswith(incomplete)]


def _complete_from(*names: str) -> Any:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _checked_assignment(text: str) -> str:
    """Return NAME=VALUE as it is. Raises SettingsError if there is no such setting, or its value has another type."""
    parse_assignment(text)
    return text


# The options of every command that generates text, by the panel of the help; those that everybody uses have none.
# `settings.given_options` and `request.parse_request` read them.
_PANELS: dict[str | None, dict[str, _Make]] = {
    None: {
        "model": _setting(
            "Name, hub id or path.", None, "--model", "-m", metavar="MODEL", autocompletion=_complete_model
        ),
        "max_new_tokens": _setting("Most tokens to generate.", None, "--max-new-tokens", "-n"),
        "temperature": _number("0 is greedy, 1 is varied.", _MODELS),
        "system": _other(str | None, metavar="TEXT", help="System message."),
        "stop": _other(list[str] | None, "--stop", metavar="TEXT", help="End before this text; repeatable."),
        "seed": _setting("Random seed: it gives one text.", "random"),
        "json": _switch("--json", help="JSON lines instead of text."),
        "quiet": _switch("--quiet", "-q", help="Only the text."),
        "verbose": _other(
            int, "--verbose", "-v", count=True, metavar="", help="Also statistics, and settings; -vv: all."
        ),
    },
    SAMPLING: {
        "top_p": _number("Keep the likeliest up to this sum.", _MODELS),
        "top_k": _setting("Keep this many of the likeliest.", _MODELS),
        "min_p": _number("Least share of the best one's.", _MODELS),
        "repetition_penalty": _number("Above 1: penalize repeats.", _MODELS),
    },
    SPECULATION: {
        "method": _name("Decoding method; all are lossless.", among=METHODS),
        "draft": _setting("Drafter: lookup, none, mtp, or a model or head.", metavar="MODEL", among=DRAFTS),
        "middle": _name(f"{', '.join(MIDDLES)}.", "the method's", among=MIDDLES),
        "budget": _setting("Tokens in the retrieval cache.", "3 %"),
        "gamma2": _setting("Drafted for the full cache.", "adaptive"),
        "tree": _setting("N nodes, auto, k-ary:2x3x1.", metavar="TREE", among=("chain", "auto", "k-ary:")),
        "verify": _switch("--verify", help="Compare with plain decoding."),
    },
    CONTEXT: {
        "raw": _switch("--raw", help="Use no chat template."),
        "think": _other(
            str | None,
            "--think",
            metavar="on|off",
            help=described("Think before the answer.", AUTO),
            envvar="TRIFORCE_THINK",
            show_envvar=False,
            among=THINK,
        ),
        "show_thinking": _switch("--show-thinking", help="Thinking on stdout, too."),
        "extend_context": _switch("--extend-context", help="Extend the context (YaRN)."),
        "cache": _switch(
            "--cache/--no-cache", help=described("Keep prompts on disk.", "long ones"), envvar="TRIFORCE_CACHE"
        ),
    },
    MEMORY: {
        "offload": _name("none, stream, host, hybrid or planes.", among=OFFLOADS),
        "memory": _size("Device memory, such as 22GiB.", "free"),
        "host_memory": _size("Host memory, such as 64GiB.", "free"),
        "resident_layers": _setting("Layers with KV on the device.", "most"),
        "link_gb_s": _number("Simulated link, on a CPU.", "none", "--link", metavar="GB/S"),
        "experts": _name("device or host.", among=EXPERTS),
        "disk": _setting("Folder for KV beyond host memory.", "none", metavar="PATH"),
        "approximate": _name(f"Lossy: {', '.join(APPROXIMATIONS)}.", "no", among=list(APPROXIMATIONS)),
        "kv": _name(f"auto, bf16, packed: exact; {', '.join(LOSSY_KV)}: lossy.", among=list(full_formats())),
        "dry_run": _switch("--dry-run", help="Print the plan; load nothing."),
    },
    MACHINE: {
        "profile": _other(
            str | None,
            "--profile",
            metavar="NAME",
            help=described("Hardware profile, or a YAML file.", "found"),
            envvar="TRIFORCE_PROFILE",
            show_envvar=False,
            autocompletion=complete_profile,
        ),
        "device": _name("cpu or cuda.", among=DEVICES),
        "dtype": _name("bfloat16, float16, float32.", among=DTYPES),
        "kernel": _name("Level of the CPU kernel, or off.", among=KERNELS),
        "quantize": _name("Round the weights: q4, q5, q6, q8.", "no", among=QUANTIZE),
        "threads": _setting("CPU threads.", "all cores"),
        "tensor_parallel": _setting("GPUs that share the model.", "profile's"),
        "set": _other(
            list[str] | None,
            "--set",
            metavar="NAME=VALUE",
            help="Any other setting (docs/options.md); repeatable.",
            parser=_checked_assignment,
        ),
    },
}
GENERATION = {name: make(name, panel) for panel, rows in _PANELS.items() for name, make in rows.items()}

PromptFiles = Annotated[
    list[str] | None, option("--prompt-file", "-f", metavar="FILE", help="Read a file; repeatable; - is stdin.")
]
_TRUNCATE = _other(
    str | None, "--truncate", metavar="PART", help="Drop the start, middle or end.", among=("start", "middle", "end")
)
# Of the commands that read documents once, and may leave a part of a long one out.
_FORM = {
    "json_schema": _other(str | None, "--json-schema", metavar="FILE|JSON", help="JSON of this schema."),
    "regex": _other(str | None, "--regex", metavar="TEXT", help="A text that matches."),
    "grammar": _other(str | None, "--grammar", metavar="FILE", help="A text of it, in Lark or GBNF."),
    "quote": _switch("--quote", help="Quotations are literal."),
    "choices": _other(str | None, "--choices", metavar="A,B,C", help="One of these."),
}
FORMS = {name: make(name, FORM) for name, make in _FORM.items()}
READING = GENERATION | FORMS
READING |= {"truncate": _TRUNCATE("", CONTEXT)}
PLACEMENT = "offload memory host_memory resident_layers link_gb_s experts disk"


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
            inspect.Parameter(name, kind, default=False if each.__origin__ is bool else None, annotation=each)
            for name, each in options.items()
        ]
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
        run.__annotations__ = {each.name: each.annotation for each in run.__signature__.parameters.values()}
        return run

    return decorate
