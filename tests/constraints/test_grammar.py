"""Schemas and grammars -> languages: what they accept, and one clear error with the place for those that are wrong."""

import json
import time
from contextlib import nullcontext

import pytest

from offload.constraints.endings import check_grammar_ends
from offload.errors import SettingsError
from offload.settings.constraint import Constraint
from tests.support.constraints import accepts, byte_matcher

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{4}-[0-9]{2}", ["1818-01"], ["1818", "1818-011", "x"]),
        ("choices", '["yes", "no, \\"never\\""]', ["yes", 'no, "never"'], ["no", "yesno", ""]),
        ("grammar", 'start: "a" b\nb: "b" b | "c"', ["ac", "abbc"], ["ab", "c"]),
        ("grammar", '?start: "a" b\n!b: "b" b | "c"', ["ac", "abbc"], ["ab", "c"]),
        ("grammar", 'root ::= "a" ("b" | [0-9]+)', ["ab", "a12"], ["a", "ba"]),
        (
            "json-schema",
            json.dumps(PERSON),
            ['{"name": "x"}', '{"name": "x", "age": 3}'],
            ['{"age": 3}', '{"name":"x"}'],
        ),
        ("json-schema", json.dumps(PERSON), [], ['{"name": "x", "other": 1}']),  # closed unless it says otherwise
        ("json-schema", json.dumps(PERSON | {"additionalProperties": True}), ['{"name": "x", "o": 1}'], []),
        ("json-schema", "true", ["1", "null"], ["x"]),
        ("json-schema", '{"type": "object"}', ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    ],
)
def test_texts_of_the_language_and_others(kind, text, good, bad):
    assert all(accepts(byte_matcher(kind, text), each.encode()) for each in good)
    assert not any(accepts(byte_matcher(kind, text), each.encode()) for each in bad)


ITSELF = {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
ENDLESS = {"$defs": {"n": ITSELF["$defs"]["n"] | {"required": ["next"]}}, "$ref": "#/$defs/n"}


def chain(count, each=lambda following: following):
    """Return a schema whose definitions refer to each other, one by one, within what `each` returns for the next."""
    named = {f"d{n}": each({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    return json.dumps({"$defs": named | {f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json-schema", "{", "not valid JSON"),
        ("json-schema", "[]", "not an object"),
        ("json-schema", '{"type": "txt"}', "at its top: Invalid type: txt"),
        ("json-schema", '{"properties": {"a": {"items": {"type": "txt"}}}}', "at /properties/a/items: Invalid type"),
        ("json-schema", '{"properties": {"a": {"uniqueItems": true}}}', "not supported, at /properties/a: uniqueItems"),
        ("json-schema", '{"anyOf": [{"type": "null"}, {"not": {}}]}', "not supported, at /anyOf/1: not"),
        ("json-schema", '{"$defs": {"x": {"enum": []}}, "properties": {"a": {"$ref": "#/$defs/x"}}}', "/properties/a"),
        ("json-schema", '{"properties": {"a": {"pattern": "(["}}}', "at /properties/a: .*unclosed character class"),
        ("json-schema", '{"properties": {"a": {"$ref": "#/$defs/b"}}}', "at /properties/a: .*does not exist"),
        ("json-schema", '{"minimum": 3, "maximum": 1, "type": "integer"}', "at its top: .*minimum .3."),
        ("json-schema", json.dumps(ENDLESS), "cannot end at /properties/next"),
        ("json-schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "cannot end"),
        ("json-schema", '{"$ref": "#"}', "cannot end|allows no answer"),
        (
            "json-schema",
            json.dumps(ENDLESS).replace("/n", "/a%20b").replace('"n"', '"a b"'),
            "cannot end at /properties/",
        ),
        ("json-schema", chain(20_000), "20,001 references, in up to 3 levels"),
        ("json-schema", '{"minimum": 1%s}' % ("0" * 400), "cannot be read: .*out of range"),
        ("json-schema", '{"minimum": NaN}', "cannot be read"),
        ("json-schema", "null", "is null, not an object"),
        ("json-schema", '{"enum": ["\\ud800"]}', "half a surrogate pair"),
        ("choices", '["a", "\\udcff"]', "half a surrogate pair"),
        ("regex", "\udcff", "half a surrogate pair"),
        ("json-schema", '{"items": ' * 200 + "{}" + "}" * 200, "nested too deeply"),
        (
            "json-schema",
            '{"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}',
            "at /items: alternatives of oneOf",
        ),
        ("grammar", 'start: "a" start', "cannot end"),
        ("grammar", 'other: "a"', "no rule that is called start"),
        ("grammar", 'start: "a" x | y\nx: "b" y\ny: ("c" | x) start', "cannot end"),
        ("grammar", 'start: "a" xx', "unknown name"),
        ("grammar", "start ->", "--grammar"),
        ("regex", "([", r"--regex: invalid regex .*: regex parse error: unclosed character class"),
        ("regex", "(?=a)b", "look-around"),
        ("choices", "[]", "choices"),
    ],
)
def test_wrong_constraints_are_refused_with_their_place(kind, text, message):
    with pytest.raises(SettingsError, match=message):
        byte_matcher(kind, text)


def test_the_place_of_an_error_is_not_looked_for_for_long(monkeypatch):
    monkeypatch.setattr("offload.constraints.grammar._PATIENCE", -1)
    with pytest.raises(SettingsError, match="at its top: Invalid type: txt"):
        byte_matcher("json-schema", '{"properties": {"a": {"type": "txt"}}}')


def test_whether_a_chain_of_rules_ends_is_found_at_once():
    rules = "".join(f"r{n}: r{n + 1}\n" for n in range(2000))
    start = time.process_time()
    for last, ends in (('"a"', True), ("r0", False)):
        with nullcontext() if ends else pytest.raises(SettingsError, match="cannot end"):
            check_grammar_ends(f"start: r0\n{rules}r2000: {last}\n")
    assert time.process_time() - start < 1  # pass by pass, a rule in each, it would be 10 s


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json-schema", json.dumps(ITSELF)),
        ("json-schema", '{"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}'),
        ("json-schema", chain(1500, lambda following: {"type": "array", "prefixItems": [following]})),
        (
            "json-schema",
            chain(40, lambda following: {"properties": {"a": following, "b": following}, "required": ["a", "b"]}),
        ),
        ("json-schema", '{"type": "string", "minItems": "many", "properties": {}, "required": [["a"]]}'),
        ("grammar", 'start: "a" start | "b"'),
        ("grammar", 'start: "a" (start)?'),
        ("grammar", 'start: "a" [start] "z"'),
        ("grammar", 'start: "a" start*  // start: "a" start'),
    ],
)
def test_what_contains_itself_or_much_and_may_end_is_accepted(kind, text):
    byte_matcher(kind, text)


@pytest.mark.parametrize(("kind", "text"), [("lark", "x"), ("regex", " ")])
def test_constraints_have_a_kind_and_a_text(kind, text):
    with pytest.raises(SettingsError):
        Constraint(kind, text)
