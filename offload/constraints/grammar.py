"""Constraints as llguidance's grammars, and an error with its place for those that are wrong."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import Degraded, SettingsError
from ..settings.constraint import CHOICES, JSON_SCHEMA, REGEX
from ..short_repr import short_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As Python's json.dumps writes it: what stands between keys and values is dictated, and costs the model no pass.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_SYNTAX = "docs/structured.md says what is accepted"
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of names to schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LEAST = -(2**63 - 1024)  # the least bound of integers that llguidance takes: one below is that of 64 bits
_UNENFORCED = {"uniqueItems", "propertyNames"}  # where llguidance cannot; pydantic writes them for sets and dicts
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]").search  # in a pattern, such as that of pydantic's Decimal
_REFERENCES = re.compile(r'"\$ref"\s*:\s*"([^"]*)"').findall
_MOST_REFERENCES = 1000  # to different definitions: through a chain of 2000, llguidance ends the process
_TREES = re.compile(r"^[ \t]*[?!]+(?=[a-z_]\w*[^:\n]*:)", re.MULTILINE)  # of rules in Lark: its trees, not the language


def compile_grammar(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a constraint. Raises SettingsError for one that is wrong, or that no answer can meet."""
    if kind == JSON_SCHEMA:
        return _compile_schema(text, tokenizer)
    matcher, reason = _try(lambda: _grammar(kind, text), tokenizer)
    return _checked(matcher, f"--{kind}", reason)


def _compile_schema(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "give a file, or the schema itself"
        raise SettingsError(f"the JSON schema is not valid JSON: {error}", hint) from None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise SettingsError(f"the JSON schema is {short_text(text)}, not an object", "give an object with a type")
    if len(set(_REFERENCES(text))) > _MOST_REFERENCES:
        raise SettingsError(f"the JSON schema refers to more than {_MOST_REFERENCES} definitions", "give a smaller one")
    matcher, reason = _try(lambda: schema_grammar(schema), tokenizer)
    place = _place(schema, schema, tokenizer) if reason else ""
    return _checked(matcher, f"the JSON schema, at {place or 'its top'}", reason)


def _try(make: Any, tokenizer: LLTokenizer) -> tuple[LLMatcher | None, str]:
    """Return the matcher of the grammar that `make` returns, and what is wrong with it; "" if nothing is."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, make(), log_level=0)
    except (ValueError, RecursionError) as error:  # of JSON or text that Rust cannot read
        return None, "a text is not UTF-8" if isinstance(error, UnicodeError) else str(error)
    unknown = sorted(_not_enforced(matcher) - _UNENFORCED)
    return matcher, matcher.get_error() or (f"{', '.join(unknown)} cannot be enforced" if unknown else "")


def _not_enforced(matcher: LLMatcher) -> set[str]:
    """Return the words of schemas that a matcher does not enforce, without formats, which are annotations."""
    found = set[str]()
    for warning in matcher.get_grammar_warnings():
        kind, _, keys = warning.partition(": ")
        if kind == "Unimplemented keys":
            found |= set(json.loads(keys))
        elif kind != "Unknown format":
            found.add("oneOf of alternatives that do not exclude each other" if "oneOf" in warning else warning)
    return found


def _checked(matcher: LLMatcher | None, what: str, reason: str) -> LLMatcher:
    """Return the matcher. Raises SettingsError if there is a `reason` against it, or no answer ends."""
    if matcher is None or reason:
        lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
        more = [line.removeprefix("error:").strip() for line in lines[1:] if line.startswith("error:")]
        raise SettingsError(f"{what}: {' '.join(lines[:1] + more)}", _SYNTAX)
    if not any(matcher.deep_copy().compute_bitmask()):
        raise SettingsError(f"{what}: it allows no answer that ends", "give one that a finite text matches")
    for word in sorted(_not_enforced(matcher) & _UNENFORCED):
        warnings.warn(f"{what}: {word} is not enforced", Degraded, stacklevel=2)
    return matcher


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the JSON texts that a schema allows, in the form of json.dumps."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(closed_schema(schema)), JSON_FORM)


def closed_schema(schema: Mapping[str, Any]) -> Any:
    """Return a schema for llguidance: an object with `properties` has no others unless the schema says so.

    Answers are valid in any case. Where schemas are merged (allOf), this could leave nothing, and no object is closed.
    """
    return _enforceable(schema, '"allOf"' not in json.dumps(schema), schema)


def _enforceable(schema: Any, closes: bool, root: Mapping[str, Any]) -> Any:
    """Return a part of a schema, the `root`, in words that llguidance knows."""
    if not isinstance(schema, dict):
        return schema
    found = {name: value for name, value in schema.items() if value is not None or name in ("const", "default")}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: _enforceable(each, closes, root) for key, each in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [_enforceable(each, closes, root) for each in value]
        elif name in _ONE and value is not None:
            found[name] = _enforceable(value, closes, root)
        elif name in ("minimum", "exclusiveMinimum") and isinstance(value, int) and value is not True:
            found[name] = max(value, _LEAST)
    if not found.get("uniqueItems", True):
        del found["uniqueItems"]
    if re.fullmatch("uuid[1-8]", str(found.get("format"))):
        found["format"] = "uuid"
    if isinstance(pattern := found.get("pattern"), str) and _LOOKS_AROUND(pattern):
        del found["pattern"]
    _name_properties(found, root)
    is_open = "properties" not in found or any(name in found for name in _OPEN)
    is_open = is_open or not set(found.get("required", ())) <= set(found["properties"])
    return found | {"additionalProperties": False} if closes and not is_open else found


def _name_properties(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Write the names of properties (`propertyNames`), as of pydantic's dict with an enum as key, as patterns."""
    names, value = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str):
        names = root.get("$defs", root.get("definitions", {})).get(reference.rpartition("/")[2])
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return
    choices = [names["const"]] if "const" in names else names.get("enum")
    pattern = names.get("pattern") if choices is None else f"^({'|'.join(re.escape(str(each)) for each in choices)})$"
    if pattern is None and not {"minLength", "maxLength"}.isdisjoint(names):
        pattern = f"^(.|\\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    if pattern is not None or names.keys() <= {"type", "title", "description"}:
        del schema["propertyNames"]
    if pattern is not None:
        schema |= {"patternProperties": {pattern: value}, "additionalProperties": False}


def _place(root: Mapping[str, Any], schema: Any, tokenizer: LLTokenizer) -> str:
    """Return the place within `schema`, a part of `root`, of the innermost schema that is wrong."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    for place, part in _parts(schema):
        if isinstance(part, dict) and _try(lambda part=part: schema_grammar(shared | part), tokenizer)[1]:
            return place + _place(root, part, tokenizer)
    return ""


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas right within a schema, but for definitions, each with its place."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict) and name not in ("$defs", "definitions"):
            yield from ((f"/{name}/{key}", each) for key, each in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from ((f"/{name}/{index}", each) for index, each in enumerate(value))
        elif name in _ONE:
            yield f"/{name}", value


def _grammar(kind: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind == CHOICES:
        choices = json.loads(text)
        if not (isinstance(choices, list) and choices and all(each and isinstance(each, str) for each in choices)):
            hint = "give texts with commas between, such as yes,no"
            raise SettingsError("--choices has an empty text, or none", hint)
        literals = (json.dumps(each, ensure_ascii=False) for each in choices)
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals))
    if "::=" not in text:
        return LLMatcher.grammar_from_lark(_TREES.sub("", text))
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises its own type, and IndexError
        raise SettingsError(f"--{kind}: {error}", "write it in Lark's or GBNF's notation") from None
