"""Schemas and grammars -> languages: what they accept, and an error with the place for those that are wrong."""

import json

import pytest

from offload.errors import Degraded, SettingsError
from offload.settings.constraint import Constraint
from tests.support.constraints import accepts, byte_matcher

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
LINKED = {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
CHAIN = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(5000)}
BY_NAME = {"type": "object", "additionalProperties": {"type": "integer"}}
UUID = "12345678-1234-4234-8234-123456789012"
# What pydantic writes for paths, secrets, bytes, decimals and others.
ANNOTATIONS = [
    {"format": each} for each in ("regex", "path", "password", "binary", "byte", "json-string", "name-email")
]
ANNOTATIONS += [{"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, {"writeOnly": True, "uniqueItems": False}]
UNSUPPORTED = ("not", "if", "contains", "dependentRequired", "unevaluatedProperties")


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{4}-[0-9]{2}", ["1818-01"], ["1818", "1818-011", "x"]),
        ("choices", '["yes", "no, \\"never\\""]', ["yes", 'no, "never"'], ["no", "yesno", ""]),
        ("grammar", 'start: "a" b\nb: "b" b | "c"', ["ac", "abbc"], ["ab", "c"]),
        ("grammar", '?start: "a" b\n!b: "b" b | "c"', ["ac", "abbc"], ["ab", "c"]),
        ("grammar", 'root ::= "a" ("b" | [0-9]+)', ["ab", "a12"], ["a", "ba"]),
        ("json-schema", json.dumps(PERSON), ['{"name": "x"}', '{"name": "x", "age": 3}'], ['{"age": 3}', '{"name":1}']),
        ("json-schema", json.dumps(PERSON), [], ['{"name": "x", "other": 1}', '{"name":"x"}']),  # closed, one spelling
        ("json-schema", json.dumps(PERSON | {"additionalProperties": True}), ['{"name": "x", "o": 1}'], []),
        ("json-schema", json.dumps(PERSON | {"required": ["other"]}), ['{"other": 1}'], ['{"name": "x"}']),
        ("json-schema", json.dumps(PERSON | {"required": None, "additionalProperties": None}), ["{}"], ['{"o": 1}']),
        ("json-schema", '{"const": null}', ["null"], ["1"]),
        ("json-schema", "true", ["1", "null"], ["x"]),
        *(
            ("json-schema", json.dumps({"items": {"type": "string"} | each}), ['["a"]'], ["[1]"])
            for each in ANNOTATIONS
        ),
        ("json-schema", json.dumps({"type": "string", "format": "uuid4"}), [f'"{UUID}"'], ['"1"']),
        ("json-schema", json.dumps({"type": "integer", "minimum": -(2**63)}), ["-1", "1"], ['"1"']),
        (
            "json-schema",
            json.dumps(BY_NAME | {"propertyNames": {"enum": ["a", "b."]}}),
            ['{"b.": 1}', "{}"],
            ['{"c": 1}'],
        ),
        (
            "json-schema",
            json.dumps({"$defs": {"E": {"enum": [1, 2]}}} | BY_NAME | {"propertyNames": {"$ref": "#/$defs/E"}}),
            ['{"1": 1}'],
            ['{"3": 1}'],
        ),
        ("json-schema", json.dumps(BY_NAME | {"propertyNames": {"minLength": 2}}), ['{"ab": 1}'], ['{"b": 1}']),
        ("json-schema", json.dumps(BY_NAME | {"propertyNames": {"pattern": "^a"}}), ['{"ab": 1}'], ['{"b": 1}']),
        ("json-schema", json.dumps(BY_NAME | {"propertyNames": {"type": "string"}}), ['{"b": 1}'], ['{"b": "c"}']),
        ("json-schema", json.dumps(LINKED), ['{"next": {"next": {}}}'], ['{"next": 1}', '{"next": {"a": 1}}']),
    ],
)
def test_texts_of_the_language_and_others(kind, text, good, bad):
    assert all(accepts(byte_matcher(kind, text), each.encode()) for each in good)
    assert not any(accepts(byte_matcher(kind, text), each.encode()) for each in bad)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, b"[1, 1]"),
        (BY_NAME | {"propertyNames": {"format": "date"}}, b'{"x": 1}'),
    ],
)
def test_what_is_not_enforced_is_said(schema, text):
    with pytest.warns(Degraded, match=f"({'|'.join(schema)}) is not enforced"):
        assert accepts(byte_matcher("json-schema", json.dumps(schema)), text)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json-schema", "{", "not valid JSON"),
        ("json-schema", "null", "is null, not an object"),
        ("json-schema", '{"type": "txt"}', "at its top: Invalid type: txt"),
        ("json-schema", '{"properties": {"a": {"items": {"type": "txt"}}}}', "at /properties/a/items: Invalid type"),
        *(("json-schema", f'{{"anyOf": [{{"{each}": {{}}}}]}}', f"at /anyOf/0: .*{each}") for each in UNSUPPORTED),
        ("json-schema", '{"properties": {"a": {"$ref": "#/$defs/b"}}}', "at /properties/a: .*does not exist"),
        ("json-schema", '{"minimum": 3, "maximum": 1, "type": "integer"}', "at its top: .*minimum .3."),
        ("json-schema", '{"items": ' * 200 + "{}" + "}" * 200, "recursion limit"),
        ("json-schema", json.dumps({"$defs": CHAIN, "$ref": "#/$defs/a0"}), "more than 1000 definitions"),
        ("choices", '["a", "\\udcff"]', "not UTF-8"),
        ("choices", "[]", "choices"),
        ("grammar", 'other: "a"', "start"),
        ("grammar", "start ->", "--grammar"),
        ("regex", "([", "--regex: .*unclosed character class"),
        ("regex", "(?=a)b", "look-around"),
    ],
)
def test_wrong_constraints_are_refused_with_their_place(kind, text, message):
    with pytest.raises(SettingsError, match=message):
        byte_matcher(kind, text)


@pytest.mark.parametrize(("kind", "text"), [("lark", "x"), ("regex", " ")])
def test_constraints_have_a_kind_and_a_text(kind, text):
    with pytest.raises(SettingsError):
        Constraint(kind, text)
