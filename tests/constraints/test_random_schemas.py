"""Random schemas, and random answers that their masks allow: another validator finds every completed one valid."""

import json
import random

import pytest

from tests.support.constraints import byte_matcher

jsonschema = pytest.importorskip("jsonschema")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
LONGEST = 1500  # bytes of an answer


def schema(choices, depth=3):
    """Return a random schema of the supported keywords."""
    kinds = [_string, _integer, _number, _enum, _const, lambda *_: {"type": choices.choice(["null", "boolean"])}]
    kinds += [_object, _object, _array, _any] * (depth > 0)
    return choices.choice(kinds)(choices, depth)


def _string(choices, depth):
    least = choices.randrange(4)
    kinds = [
        {},
        {"minLength": least, "maxLength": least + choices.randrange(12)},
        {"pattern": choices.choice(["^[A-Z][a-z]{0,6}$", "^(ab|cd)+$", "^[0-9]{4}-[0-9]{2}$"])},
        {"format": choices.choice(FORMATS)},
    ]
    return {"type": "string"} | choices.choice(kinds)


def _integer(choices, depth):
    least = choices.randrange(-50, 50)
    bounds = [{}, {"minimum": least}, {"minimum": least, "maximum": least + choices.randrange(100)}, {"multipleOf": 3}]
    return {"type": "integer"} | choices.choice(bounds)


def _number(choices, depth):
    least = choices.randrange(-5, 5)
    bounds = [
        {},
        {"minimum": least, "maximum": least + 2.5},
        {"exclusiveMinimum": least, "exclusiveMaximum": least + 1},
    ]
    return {"type": "number"} | choices.choice(bounds)


def _enum(choices, depth):
    return {"enum": choices.sample(["a", 'b"\\', "ü", 3, -1.5, None, True, [1], {"k": 1}], choices.randrange(1, 4))}


def _const(choices, depth):
    return {"const": choices.choice(["x", 7, None, [1, "y"], {"a": [True]}])}


def _object(choices, depth):
    names = choices.sample(["id", "name", "ä", 'q"', "list", "a b"], choices.randrange(1, 5))
    found = {"type": "object", "properties": {name: schema(choices, depth - 1) for name in names}}
    found["required"] = [name for name in names if choices.random() < 0.6]
    more = [{}, {}, {"additionalProperties": False}, {"additionalProperties": schema(choices, 0)}]
    return found | choices.choice(more)


def _array(choices, depth):
    least = choices.randrange(3)
    bounds = [{}, {"minItems": least, "maxItems": least + choices.randrange(3)}]
    if choices.random() < 0.2:
        return {"type": "array", "prefixItems": [schema(choices, depth - 1)], "items": False, "minItems": 1}
    return {"type": "array", "items": schema(choices, depth - 1)} | choices.choice(bounds)


def _any(choices, depth):
    return {"anyOf": [schema(choices, depth - 1) for _ in range(choices.randrange(1, 4))]}


def answer(choices, matcher):
    """Return a random answer, None if it does not end soon. Bytes that end something are taken more often."""
    text = bytearray()
    while len(text) < LONGEST:
        allowed = matcher.allowed().nonzero()[0].tolist()
        closing = [token for token in allowed if token == 256 or token in b'"}],:']
        token = choices.choice(closing) if closing and choices.random() < 0.4 else choices.choice(allowed)
        if token == 256:
            return bytes(text)
        assert matcher.consume(token)
        text.append(token)
    return None


@pytest.mark.daily("0")
@pytest.mark.parametrize("part", range(20))
def test_every_completed_answer_is_valid(part):
    completed = 0
    for number in range(25):
        choices = random.Random(25 * part + number)
        wanted = schema(choices)
        matcher = byte_matcher("json-schema", json.dumps(wanted))
        text = answer(choices, matcher)
        if text is not None:
            completed += 1
            value = json.loads(text.decode())
            jsonschema.Draft202012Validator(wanted).validate(value)
    assert completed >= 15
