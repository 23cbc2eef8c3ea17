"""The lines of a batch: read, parsed once, and each an item with a prompt, an id and options of its own. No torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.errors import PromptError, UsageError
from offload.settings.config import GenerationConfig, Sampling, check_part
from offload.settings.generation import parse_sampling
from offload.short_repr import short_json

from ..input.documents import PROMPT_HINT, STDIN, Warn, is_terminal, unreadable
from ..input.json_fields import FLAG, INTEGER, NUMBER, TEXT, FieldType, has_type, parse_object
from ..options.constraint_options import constraint_of
from ..options.declarations import THINK

Id = str | int | float
NumberedLine = tuple[int, str]  # from 1; bytes that are not UTF-8 are surrogates
EXAMPLE = 'write one object a line, such as {"id": "a", "prompt": "Hello"}'

_BY_ANNOTATION: dict[Any, FieldType] = {
    **{"int": INTEGER, "int | None": INTEGER, "float": NUMBER, "bool": FLAG},
    "tuple[str, ...]": ((str, list), "a text or a list of texts"),
}
_RENAMED = ("coupled", "constraint")  # fields that have other names in a line
_OPTIONS = {
    option.name: _BY_ANNOTATION[option.type]
    for group in (GenerationConfig, Sampling)
    for option in fields(group)
    if option.name not in _RENAMED
}
_KEYS: dict[str, FieldType] = {
    **{"prompt": TEXT, "id": ((str, int, float), "a text or a number"), "system": TEXT, "raw": FLAG, "think": TEXT},
    **{"sampling": TEXT, "regex": TEXT, "grammar": TEXT},
    **{"json_schema": ((dict, bool, str), "a schema"), "choices": (list, "a list of texts")},
    **_OPTIONS,
}


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
    """A line that is not an item, and why. `id` is None where the line has none that can be read."""

    line: int
    id: Id | None
    error: UsageError


def read_lines(path: str, stdin: Any, warn: Warn) -> list[NumberedLine]:
    """Return the lines of a file, or of standard input for `-`, that are not blank.

    Raises PromptError for a file that cannot be read.
    """
    if path != str(STDIN):
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise unreadable(Path(path), error) from None
    elif stdin is None:
        raise PromptError("standard input is closed", PROMPT_HINT)
    else:
        if is_terminal(stdin):
            warn("reading from the terminal; end it with Ctrl-D")
        data = getattr(stdin, "buffer", stdin).read()
    lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in data.split(b"\n"))
    return [(number, line.decode("utf-8", "surrogateescape")) for number, line in enumerate(lines, 1) if line]


def parse_lines(
    lines: Sequence[NumberedLine], finished: Collection[Id], name: str
) -> tuple[list[BatchItem | BadLine], int]:
    """Return the items that are to be answered with the bad lines between them, and how many are `finished`.

    Raises PromptError if the file `name` has no line, and if none of several is an item: it is another file.
    """
    items: list[BatchItem | BadLine] = []
    lines_by_id: dict[Id, int] = {}
    for number, text in lines:
        item = parse_line(number, text)
        if isinstance(item, BatchItem) and (other := lines_by_id.setdefault(item.id, number)) != number:
            item = BadLine(number, item.id, PromptError(f"line {other} has the same id", "give each line another id"))
        if isinstance(item, BadLine) or item.id not in finished:
            items.append(item)
    if not lines:
        raise PromptError(f"{name} has no requests", EXAMPLE)
    if not lines_by_id and len(items) > 1:
        raise PromptError(f"none of the {len(items):,} lines of {name} is a request", EXAMPLE)
    return items, len(lines) - len(items)


def parse_line(number: int, text: str) -> BatchItem | BadLine:
    """Return the item of a line, a JSON object in UTF-8, or what is wrong with it."""
    id: Id | None = None
    try:
        try:
            values = parse_object(text)
        except ValueError as error:
            raise PromptError(str(error), EXAMPLE) from None
        given = {name: value for name, value in values.items() if value is not None or name not in _KEYS}
        if has_type(given.get("id", number), _KEYS["id"]):
            id = given.get("id", number)
        for name, value in given.items():
            _check(name, value)
        return _item(given, number)
    except UsageError as error:
        return BadLine(number, id, error)


def _check(name: str, value: Any) -> None:
    """Raise PromptError for a key that is unknown, and for a value of another type."""
    if name not in _KEYS:
        close = get_close_matches(name, _KEYS, 1)
        known = f"did you mean {close[0]}?" if close else f"use {', '.join(_KEYS)}"
        raise PromptError(f"unknown key {short_json(name)}", known)
    is_list_of_others = isinstance(value, list) and not all(isinstance(entry, str) for entry in value)
    if not has_type(value, _KEYS[name]) or is_list_of_others:
        raise PromptError(f"{name} is {short_json(value)}", f"give {_KEYS[name][1]}, or leave it out")


def _item(values: Mapping[str, Any], line: int) -> BatchItem:
    if "prompt" not in values:
        raise PromptError("there is no prompt", EXAMPLE)
    if not values["prompt"].strip():
        raise PromptError("the prompt is empty", "give it some text")
    options = {name: values[name] for name in _OPTIONS if name in values}
    if "stop" in values:
        options["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    if "sampling" in values:
        options["coupled"] = parse_sampling(values["sampling"])
    if (constraint := constraint_of(values)) is not None:
        options["constraint"] = constraint
    system, raw, think = (values.get(name) for name in ("system", "raw", "think"))
    if think not in (None, *THINK):
        raise PromptError(f"think is {short_json(think)}", f"give one of {', '.join(THINK)}, or leave it out")
    check_part(options)
    return BatchItem(line, values.get("id", line), values["prompt"], options, system, raw, think)
