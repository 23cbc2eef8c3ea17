"""Constraints as grammars of llguidance, and what is wrong with those that are none, with the place in the schema."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..settings.constraint import CHOICES, GRAMMAR, JSON_SCHEMA, REGEX
from ..short_repr import short_repr, short_text
from .endings import check_ends, check_grammar_ends, check_levels

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As Python's json.dumps writes it: what lies between keys and values is dictated, and costs the model no pass.
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GRAMMAR_PLACE = re.compile(r"^at \d+\(\d+\): | \(in regex\)")  # in the grammar around an expression, not in the user's
_TREES = re.compile(r"^[ \t]*[?!]+(?=[a-z_]\w*[^:\n]*:)", re.MULTILINE)  # of rules in Lark: its trees, not the language
_HALF = "--{} has half a surrogate pair, which is no character"
_SYNTAX = "docs/structured.md says what is accepted"
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of names to schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


_PATIENCE = 2.0  # seconds to look for the place of an error, for which each part of a schema is compiled by itself
_STACK = 1 << 28  # bytes, of which 6,000 are used for each level of a schema
_ONE_STARTS = threading.Lock()


def compile_grammar(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a constraint. Raises SettingsError for one that is wrong, or that no answer can meet.

    In a thread with a large stack: llguidance follows references by recursion, and would end the process beyond it.
    """
    found: list[LLMatcher | BaseException] = []

    def run() -> None:
        try:
            found.append(_compiled(kind, text, tokenizer))
        except BaseException as error:  # as a panic in Rust is
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with _ONE_STARTS:
        usual = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _compiled(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    if kind == JSON_SCHEMA:
        schema = read_schema(text)
        check_levels(schema)
        try:
            matcher = LLMatcher(tokenizer, schema_grammar(schema), log_level=0)
            if matcher.is_error():
                raise _schema_error(schema, tokenizer, matcher.get_error())
            check_ends(schema)
        except (ValueError, RecursionError) as error:  # of JSON in Rust, and of what reads schemas here
            if "hex escape" in str(error):
                raise SettingsError(_HALF.format(JSON_SCHEMA), "use UTF-8") from None
            if isinstance(error, RecursionError) or "recursion limit" in str(error):
                raise SettingsError(
                    "the JSON schema is nested too deeply", "use $defs and $ref, or fewer levels"
                ) from None
            raise SettingsError(f"the JSON schema cannot be read: {error}", _SYNTAX) from None
    else:
        try:
            matcher = LLMatcher(tokenizer, _grammar(kind, text), log_level=0)
        except UnicodeEncodeError:  # bytes of a command line that are no text, or escapes of JSON
            raise SettingsError(_HALF.format(kind), "use UTF-8") from None
        if matcher.is_error():
            reason = _first_line(matcher.get_error())
            if kind == REGEX:
                reason = _GRAMMAR_PLACE.sub("", reason)
            raise SettingsError(f"--{kind}: {reason}", _SYNTAX)
    probe = matcher.deep_copy()
    if not any(probe.compute_bitmask()) or probe.is_error():
        raise SettingsError(f"--{kind} allows no answer that ends", "give one that a finite text matches")
    return matcher


def read_schema(text: str) -> dict[str, Any]:
    """Return a JSON schema as an object. Raises SettingsError for what is none."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"the JSON schema is not valid JSON: {error}", "give a file, or the schema itself"
        ) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SettingsError(f"the JSON schema is {short_text(text)}, not an object", "give an object with a type")
    return schema


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the JSON texts that a schema allows, in the form of json.dumps.

    An object with `properties` has no others unless the schema says so: answers are valid in any case. Where schemas
    are merged (allOf), this could leave nothing, and nothing is changed.
    """
    from llguidance import LLMatcher

    whole = json.dumps(schema)
    return LLMatcher.grammar_from_json_schema(whole if '"allOf"' in whole else json.dumps(_closed(schema)), _FORM)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for where, _ in _places(schema):
        _replace(found, where)
    is_open = "properties" not in schema or any(name in schema for name in _OPEN)
    return found if is_open else found | {"additionalProperties": False}


def _replace(found: dict[str, Any], where: tuple[Any, ...]) -> None:
    """Close the schema at a place, whose containers are copied."""
    name = where[0]
    if len(where) == 1:
        found[name] = _closed(found[name])
        return
    container = found[name].copy()
    container[where[1]] = _closed(container[where[1]])
    found[name] = container


def _places(schema: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the schemas right within a schema, each with its place."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            yield from (((name, key), each) for key, each in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from (((name, index), each) for index, each in enumerate(value))
        elif name in _ONE:
            yield (name,), value


def _schema_error(schema: dict[str, Any], tokenizer: LLTokenizer, reason: str) -> SettingsError:
    """Return the error of a schema with the place of the innermost schema that has it, as far as that is soon found."""
    from llguidance import LLMatcher

    end = time.monotonic() + _PATIENCE

    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

    def fails(part: Any) -> str:
        if time.monotonic() > end:
            return ""
        if not isinstance(part, dict):
            return "" if isinstance(part, bool) else f"{short_repr(part)} is no schema"
        try:
            found = LLMatcher(tokenizer, schema_grammar(shared | part), log_level=0)
        except ValueError as error:
            return str(error)
        return found.get_error() if found.is_error() else ""

    place, part = "", schema
    while True:
        for where, inner in _places(part):
            if (place or where[0] not in shared or part is not schema) and (found := fails(inner)):
                place += "".join(f"/{each}" for each in where)
                part, reason = inner, found
                break
        else:
            at = f"at {place}" if place else "at its top"
            unsupported = "Unimplemented keys: "
            reason = _first_line(reason)
            if reason.startswith(unsupported):
                names = ", ".join(json.loads(reason.removeprefix(unsupported)))
                return SettingsError(f"the JSON schema has a keyword that is not supported, {at}: {names}", "remove it")
            if reason.startswith("oneOf constraints"):
                reason = "alternatives of oneOf that an answer could both match are not supported"
                return SettingsError(f"the JSON schema is wrong {at}: {reason}", "use anyOf")
            return SettingsError(f"the JSON schema is wrong {at}: {reason}", _SYNTAX)


def _grammar(kind: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind == CHOICES:
        choices = json.loads(text)
        if not (isinstance(choices, list) and choices and all(each and isinstance(each, str) for each in choices)):
            raise SettingsError(
                "--choices has an empty text, or none", "give texts with commas between, such as yes,no"
            )
        literals = (json.dumps(each, ensure_ascii=False) for each in choices)
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals))
    assert kind == GRAMMAR, kind
    if "::=" not in text:
        text = _TREES.sub("", text)
    if "::=" not in text and not re.search(r"^\s*start\b[^:]*:", text, re.MULTILINE):
        raise SettingsError("--grammar has no rule that is called start", "in GBNF, which has ::=, it is root")
    try:
        lark = any_to_lark(text)
    except Exception as error:  # the converter raises its own type, and IndexError
        raise SettingsError(f"--grammar: {error}", "write it in Lark's or GBNF's notation") from None
    check_grammar_ends(lark)
    return LLMatcher.grammar_from_lark(lark)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " ".join(lines[:1] + [line[6:].strip() for line in lines[1:] if line.startswith("error:")])
