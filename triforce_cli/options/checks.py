"""Flags that exclude each other, files that are read and written, lossy modes, offloading that cannot be had here."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.errors import SettingsError
from offload.settings.config import Placement, Sampling
from offload.settings.constraint import QUOTE
from offload.settings.generation import FASTEST
from offload.settings.kv_formats import LOSSY_KV
from offload.settings.method_sizes import forgetting_capacity
from offload.short_repr import short_repr
from offload.units import counted

from ..input.excerpts import END, MIDDLE, PARTS, START
from ..output.output_files import check_file
from .constraint_options import FIELDS
from .declarations import AUTO, THINK
from .settings import Settings

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.architecture.dims import Dimensions

Named = tuple[str, Path | str | None]  # the option, and the file that it names, if any

_ONE_FORM = "an answer matches one of them: leave the other out"
_ALONE = "a single prompt runs alone; or give --batch FILE"
_CONTRADICTIONS = (  # pairs of parameters that are not given together, and why
    ("raw", "system", "--raw uses no chat template, which a system message needs"),
    ("raw", "think", "--raw uses no chat template, which --think needs"),
    ("raw", "show_thinking", "--raw writes all text, and --show-thinking has no effect"),
    ("quiet", "verbose", "choose one"),
    *((first, second, _ONE_FORM) for first, second in combinations((*FIELDS, QUOTE), 2)),
    ("truncate", "extend_context", "choose one of them for a text that exceeds the context"),
    ("batch", "truncate", "each prompt of a batch fits the context, or is an error"),
    ("batch", "prompt", "a batch has its prompts in a file"),
    ("batch", "prompt_file", "a batch has its prompts in a file"),
    ("batch", "quote", "quotations are of one document, and a batch has many prompts"),
    ("batch", "verify", "check one of the prompts by itself, with the --seed of its result"),
)
_NEEDED = (("parallel", "batch", _ALONE), ("ray", "batch", _ALONE))  # of `generate`


def check_combinations(params: Mapping[str, Any]) -> None:
    """Raise SettingsError for parameters that contradict each other, or that have no effect without another one."""
    given = {name for name, value in params.items() if value} - ({"think"} if params.get("think") == AUTO else set())
    for first, second, why in _CONTRADICTIONS:
        if {first, second} <= given:
            raise SettingsError(f"{_flag(first)} and {_flag(second)} contradict each other", why)
    for name, other, why in _NEEDED:
        if other in params and name in given and other not in given:
            raise SettingsError(f"{_flag(name)} goes with {_flag(other)}", why)
    for name, values, hint in (
        ("think", THINK, "use --think off"),
        ("truncate", PARTS, f"name what is left out: {START} (transformers' left), {MIDDLE} or {END} (right)"),
    ):
        if name in given and params[name] not in values:
            raise SettingsError(f"--{name} {short_repr(params[name])} is not one of {', '.join(values)}", hint)
    for name in ("system", "stop", "focus", "question", "language"):
        if any("\ud800" <= char <= "\udfff" for char in "".join(params.get(name) or ())):  # of bytes that are no text
            raise SettingsError(f"--{name} is not valid UTF-8", "give it in the encoding of the terminal")


def _flag(name: str) -> str:
    return "the prompt argument" if name == "prompt" else f"--{name.replace('_', '-')}"


def named_files(ctx: typer.Context) -> list[Named]:
    """Return the options of a command that may name a file to read, but for its prompts."""
    return [(f"--{name}", ctx.params[name]) for name in ("model", "draft", "profile") if name in ctx.params]


def check_distinct(inputs: Iterable[Named], option: str, output: Path | str | None) -> None:
    """Raise SettingsError if the file that an option writes is one that the command reads."""
    for name, file in inputs:
        if output is not None and file is not None and _is_same(str(file), str(output)):
            both = f"{name} {file} and {option} {output}".lstrip()
            raise SettingsError(f"{both} are the same file", f"give {option} another file: it would be overwritten")


def _is_same(read: str, written: str) -> bool:
    with suppress(OSError, RuntimeError, ValueError):  # a name of no file, such as a hub's model, is no input
        one, two = Path(read).expanduser(), Path(written).expanduser()
        return one.is_file() and two.exists() and one.samefile(two)
    return False


def check_output(name: str | None, inputs: Iterable[Named]) -> Path | None:
    """Return the file of --output; None for stdout, which is - too.

    Raises SettingsError for a file that is read or cannot be written.
    """
    if name in (None, "-"):
        return None
    check_distinct(inputs, "--output", name)
    path = Path(name).expanduser()
    if path.is_dir() or not path.exists():
        check_file(path, "--output", "answer.txt")
    return path


def refuse_unverifiable(settings: Settings, sampling: Sampling) -> None:
    """Raise SettingsError if plain decoding would give another output: the draws depend on the method."""
    if sampling.kind != FASTEST:
        return
    why, hint = f"the temperature is {sampling.temperature}", "add a --seed, or use --temperature 0"
    if "coupled" in settings.values:
        why, hint = "coupled=false has none", "leave coupled out and give a --seed, or use --temperature 0"
    raise SettingsError(f"--verify needs draws that plain decoding repeats, and {why}", hint)


def lossy_modes(settings: Settings) -> tuple[str, ...]:
    """Return the flags that change the answer, such as `--kv q8`; none for an exact run."""
    modes = {"--approximate": settings.speculation.approximate, "--kv": quantized_kv(settings)}
    return tuple(f"{flag} {mode}" for flag, mode in modes.items() if mode is not None)


def quantized_kv(settings: Settings) -> str | None:
    """Return the format to which keys and values are quantised, or None."""
    return settings.engine.kv if settings.engine.kv in LOSSY_KV else None


def refuse_inexact(settings: Settings, params: Mapping[str, Any]) -> None:
    """Raise SettingsError for flags that need an exact answer, or all keys and values, where there are none."""
    mode, where, hint = " and ".join(lossy_modes(settings)), settings.placement, "leave one of the two out"
    if mode and params.get("verify"):
        raise SettingsError(f"--verify compares with exact decoding, and {mode} changes the answer", hint)
    if settings.speculation.approximate is None:
        return
    if len(lossy_modes(settings)) > 1:
        raise SettingsError(f"{mode} cannot be used together", hint)
    if params["dry_run"]:
        raise SettingsError(f"--dry-run plans exact decoding, not {mode}", hint)
    for flag in (*dividing_flags(where), *_given({"link": where.link_gb_s, "disk": where.disk})):
        raise SettingsError(f"{flag} offloads keys and values, and those of {mode} stay on the device", hint)


def dividing_flags(where: Placement) -> list[str]:
    """Return the flags that divide keys and values between a device and the host."""
    offload = where.offload if where.offload not in ("auto", "none") else None
    return _given({"offload": offload, "resident-layers": where.resident_layers, "host-share": where.host_share})


def expert_flags(where: Placement) -> list[str]:
    """Return the flags that ask for experts in host memory, beside a device."""
    return _given({"experts": None if where.experts in ("auto", "device") else where.experts})


def _given(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name} {value}" for name, value in options.items() if value is not None]


def approximation_warnings(settings: Settings) -> Iterator[str]:
    """Yield the warnings of a lossy run, which are printed before its text."""
    if (level := settings.engine.quantize) is not None:
        yield f"--quantize {level} changes the model: the answers are those of rounded weights"
    if kv := quantized_kv(settings):
        yield f"--kv {kv} changes the answer: the model attends to rounded keys and values"
    if (mode := settings.speculation.approximate) is not None:
        most = counted(forgetting_capacity(settings.speculation), "token")
        yield f"--approximate {mode} changes the answer: the model attends to {most} at most, and forgets others"


def check_tiers(model: OpenModel, placement: Placement) -> None:
    """Raise SettingsError for tiers that this machine does not have."""
    from offload.system.scratch_file import ScratchFile

    on_cpu, link = model.device.type == "cpu", placement.link_gb_s
    if not on_cpu and link is not None:
        raise SettingsError("--link simulates a link on a CPU, and this is a GPU with its own", "leave it out")
    if placement.disk is not None:
        ScratchFile(Path(placement.disk), 1)  # can be made
    has_one_memory = on_cpu and link is None
    check_layers(placement, model.checkpoint.shape, has_one_memory)
    model.check_experts(placement.experts)
    for flag in dividing_flags(placement) if has_one_memory else ():
        raise SettingsError(
            f"{flag} divides KV between a device and the host, and this device is the CPU",
            "leave it out: a CPU attends to its memory where it is; or simulate a link, such as --link 25",
        )


def check_layers(placement: Placement, shape: Dimensions, has_one_memory: bool) -> None:
    """Raise SettingsError for more layers than this model has, and experts that it or this machine does not have."""
    for flag in expert_flags(placement):
        if shape.experts is None:
            raise SettingsError(f"{flag} is for a mixture of experts, and this model is none", "leave it out")
        if has_one_memory:
            raise SettingsError(
                f"{flag} divides experts between a device and the host, and this device is the CPU",
                "leave it out: a CPU runs experts in its memory where they are; or simulate a link, such as --link 25",
            )
    asked, layers = placement.resident_layers, shape.kv_layers
    if asked is not None and asked > layers:
        wrong = f"--resident-layers is {asked:,}, and {layers} layers of this model have a KV cache of all tokens"
        raise SettingsError(wrong, f"use {layers} or fewer, or leave it out for as many as fit")


def free_on_disk(folder: Path) -> int:
    """Return the free bytes on a folder's disk. Raises SettingsError for a folder that does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise SettingsError(f"--disk {folder}: {(error.strerror or str(error)).lower()}", "name a folder") from error
