"""One line of a batch: a prompt, its id, and the options that it sets for itself. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf
from typing import Any

from offload.errors import PromptError, SettingsError, UsageError
from offload.settings.config import GenerationConfig, Sampling, check_part
from offload.settings.generation import parse_sampling
from offload.short_repr import short_repr

from ..options.constraint_options import constraint_of
from ..options.declarations import THINK
from ..options.settings import refuse_broken_text

Id = str | int | float
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
}
_OTHERS = ("coupled", "constraint")  # fields that have other names in a line
# The options of a line, by the type of their values; `stop` is checked apart.
_OPTIONS = {f.name: f.type for group in (GenerationConfig, Sampling) for f in fields(group) if f.name not in _OTHERS}
_KEYS = {"prompt": "str", "id": "id", "system": "str", "raw": "bool", "think": "str", "sampling": "str"} | _OPTIONS
_KEYS |= {"json_schema": "schema", "choices": "texts", "regex": "str", "grammar": "str"}


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line.

    Args:
        line: its number, from 1.
        id: its own, else the line's number.
        options: settings by name, as `Settings.values`, that hold for this request alone.
        system, raw, think: as in `Request`; None where the line does not say.
    """

    line: int
    id: Id
    prompt: str
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    raw: bool | None = None
    think: str | None = None


class LineError(Exception):
    """A line that is no request. `id` is None where the line has none that can be read."""

    def __init__(self, line: int, id: Id | None, error: UsageError) -> None:
        super().__init__(error.message)
        self.line, self.id, self.error = line, id, error


def repeated(request: LineRequest, first: int) -> LineError:
    """Return the error of a request whose id an earlier line has."""
    return LineError(
        request.line, request.id, PromptError(f"line {first} has the same id", "give each line another id")
    )


def parse_line(data: bytes, line: int) -> LineRequest:
    """Return the request of a line: a JSON object in UTF-8. Raises LineError."""
    id: Id | None = None
    try:
        values = _parse_object(data)
        id = _id_of(values, line)
        _check_keys(values)
        return _request(values, line, id)
    except UsageError as error:
        raise LineError(line, id, error) from None


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise PromptError(f"not valid UTF-8: {error.reason} at byte {error.start}", "save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise PromptError(f"not valid JSON: {error}", EXAMPLE) from None
    if not isinstance(values, dict):
        raise PromptError(f"not a JSON object but {short_repr(values)}", EXAMPLE)
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _id_of(values: Mapping[str, Any], line: int) -> Id:
    if "id" not in values:
        return line
    _check_type("id", values["id"])
    if isinstance(values["id"], str):
        _refuse_broken("id", values["id"])
    elif abs(values["id"]) == inf:
        raise PromptError("id is a number without end", "give a smaller one: JSON cannot have it in the result")
    return values["id"]


def _check_keys(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name not in _KEYS:
            close = get_close_matches(name, _KEYS, 1)
            known = f"did you mean {close[0]}?" if close else f"use {', '.join(_KEYS)}"
            raise PromptError(f"unknown key {short_repr(name)}", known)
        _check_type(name, value)


def _check_type(name: str, value: Any) -> None:
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise PromptError(f"stop is {short_repr(value)}", "give a text or a list of texts")
        return
    types, described = _TYPES[_KEYS[name]]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise PromptError(f"{name} is {short_repr(value)}", f"give {described}, or leave it out")


def _request(values: Mapping[str, Any], line: int, id: Id) -> LineRequest:
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
    for name, texts in (
        ("prompt", [prompt]),
        ("system", [values.get("system", "")]),
        ("stop", options.get("stop", ())),
    ):
        for text in texts:
            _refuse_broken(name, text)
    if values.get("think") not in (None, *THINK):
        raise PromptError(f"think is {short_repr(values['think'])}", f"give one of {', '.join(THINK)}, or leave it out")
    check_part(options)
    return LineRequest(line, id, prompt, options, *(values.get(name) for name in ("system", "raw", "think")))


def _refuse_broken(name: str, text: str) -> None:
    try:
        refuse_broken_text(name, [text])
    except SettingsError:
        raise PromptError(f"{name} has half a surrogate pair, which is no character", "write both halves") from None
