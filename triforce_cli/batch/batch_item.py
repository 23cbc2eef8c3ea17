"""The lines of a batch: read, parsed once, and each an item with a prompt, an id and options of its own. No torch."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.errors import PromptError, UsageError
from offload.settings.config import GenerationConfig, Sampling, check_part
from offload.settings.generation import parse_sampling
from offload.short_repr import short_repr

from ..input.documents import PROMPT_HINT, STDIN, Warn, is_terminal, unreadable
from ..options.constraint_options import constraint_of
from ..options.declarations import THINK

Id = str | int | float
NumberedLine = tuple[int, str]  # from 1; bytes that are not UTF-8 are surrogates
EXAMPLE = 'write one object a line, such as {"id": "a", "prompt": "Hello"}'

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "int | None": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "schema": ((dict, bool, str), "a schema"),
    "texts": ((list,), "a list of texts"),
    "id": ((str, int, float), "a text or a number"),
    "tuple[str, ...]": ((str, list), "a text or a list of texts"),
}
_OTHERS = ("coupled", "constraint")  # fields that have other names in a line
# The options of a line, by the type of their values.
_OPTIONS = {f.name: f.type for group in (GenerationConfig, Sampling) for f in fields(group) if f.name not in _OTHERS}
_KEYS = {"prompt": "str", "id": "id", "system": "str", "raw": "bool", "think": "str", "sampling": "str"} | _OPTIONS
_KEYS |= {"json_schema": "schema", "choices": "texts", "regex": "str", "grammar": "str"}


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A line that asks for a text.

    Args:
        line: its number, from 1.
        id: its own, else the line's number.
        options: settings by name, as `Settings.values`, that hold for this item alone.
        system, raw, think: as in `Request`; None where the line does not say.
    """

    line: int
    id: Id
    prompt: str
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    raw: bool | None = None
    think: str | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no item, and why. `id` is None where the line has none that can be read."""

    line: int
    id: Id | None
    error: UsageError


def read_lines(path: str, stdin: Any, warn: Warn) -> list[NumberedLine]:
    """Return the lines of a file, or of standard input for `-`, that are not blank.

    Raises PromptError for a file that cannot be read.
    """
    if path == str(STDIN):
        if stdin is None:
            raise PromptError("standard input is closed", PROMPT_HINT)
        if is_terminal(stdin):
            warn("reading from the terminal; end it with Ctrl-D")
        data = getattr(stdin, "buffer", stdin).read()
    else:
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise unreadable(Path(path), error) from None
    lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in data.split(b"\n"))
    return [(number, line.decode("utf-8", "surrogateescape")) for number, line in enumerate(lines, 1) if line]


def parse_lines(
    lines: Sequence[NumberedLine], finished: Collection[Id], name: str
) -> tuple[list[BatchItem | BadLine], int]:
    """Return the items that are to be answered with the bad lines between them, and how many are `finished`.

    Raises PromptError if the file `name` has no line, and if none of several is an item: it is another file.
    """
    found: list[BatchItem | BadLine] = []
    first: dict[Id, int] = {}
    answered = 0
    for number, text in lines:
        each = parse_line(number, text)
        if isinstance(each, BatchItem) and (other := first.setdefault(each.id, number)) != number:
            each = BadLine(number, each.id, PromptError(f"line {other} has the same id", "give each line another id"))
        if isinstance(each, BatchItem) and each.id in finished:
            answered += 1
        else:
            found.append(each)
    if not lines:
        raise PromptError(f"{name} has no requests", EXAMPLE)
    if not first and len(found) > 1:
        raise PromptError(f"none of the {len(found):,} lines of {name} is a request", EXAMPLE)
    return found, answered


def parse_line(number: int, text: str) -> BatchItem | BadLine:
    """Return the item of a line, a JSON object in UTF-8, or what is wrong with it."""
    id: Id | None = None
    try:
        values = _parse_object(text)
        if "id" in values:
            _check_type("id", values["id"])
        id = values.get("id", number)
        _check_keys(values)
        return _item(values, number, id)
    except UsageError as error:
        return BadLine(number, id, error)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text.encode("utf-8").decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeEncodeError as error:
        raise PromptError(f"not valid UTF-8 at character {error.start}", "save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise PromptError(f"not valid JSON: {error}", EXAMPLE) from None
    if not isinstance(values, dict):
        raise PromptError(f"not a JSON object but {short_repr(values)}", EXAMPLE)
    for name, value in values.items():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            wrong = f"{name} has half a surrogate pair, which is no character"
            raise PromptError(wrong, "write both halves") from None
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _check_keys(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name not in _KEYS:
            close = get_close_matches(name, _KEYS, 1)
            known = f"did you mean {close[0]}?" if close else f"use {', '.join(_KEYS)}"
            raise PromptError(f"unknown key {short_repr(name)}", known)
        _check_type(name, value)


def _check_type(name: str, value: Any) -> None:
    types, described = _TYPES[_KEYS[name]]
    is_wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    if is_wrong or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
        raise PromptError(f"{name} is {short_repr(value)}", f"give {described}, or leave it out")


def _item(values: Mapping[str, Any], line: int, id: Id) -> BatchItem:
    prompt = values.get("prompt")
    if prompt is None:
        raise PromptError("there is no prompt", EXAMPLE)
    if not prompt.strip():
        raise PromptError("the prompt is empty", "give it some text")
    options = {name: values[name] for name in _OPTIONS if name in values}
    if "stop" in values:
        options["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    if "sampling" in values:
        options["coupled"] = parse_sampling(values["sampling"])
    if (constraint := constraint_of(values)) is not None:
        options["constraint"] = constraint
    if values.get("think") not in (None, *THINK):
        raise PromptError(f"think is {short_repr(values['think'])}", f"give one of {', '.join(THINK)}, or leave it out")
    check_part(options)
    return BatchItem(line, id, prompt, options, *(values.get(name) for name in ("system", "raw", "think")))
