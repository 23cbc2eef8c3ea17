"""Random schemas, and random answers that their masks allow: another validator finds every completed one valid."""

import json
import random

import pytest

from tests.support.constraints import byte_matcher

jsonschema = pytest.importorskip("jsonschema")
LONGEST = 1500  # bytes of an answer
LEAVES = (
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z][a-z]{0,6}$"},
    *({"type": "string", "format": each} for each in ("date", "time", "date-time", "uuid", "ipv4", "email")),
    {"type": "integer", "minimum": -7, "maximum": 50},
    {"type": "integer", "multipleOf": 3},
    {"type": "number", "exclusiveMinimum": -2, "exclusiveMaximum": 1},
    {"enum": ["a", 'b"\\', "ü", 3, -1.5, None, True, [1], {"k": 1}]},
    {"const": {"a": [True, "y"]}},
    {"type": ["null", "boolean"]},
)


def schema(choices, depth=3):
    """Return a random schema of the supported keywords."""
    kind = choices.choice(["leaf", "object", "object", "array", "tuple", "any"]) if depth else "leaf"
    if kind == "leaf":
        return choices.choice(LEAVES)
    if kind == "any":
        return {"anyOf": [schema(choices, depth - 1) for _ in range(choices.randrange(1, 4))]}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [schema(choices, depth - 1)], "items": False, "minItems": 1}
    if kind == "array":
        least = choices.randrange(3)
        return {"type": "array", "items": schema(choices, depth - 1), "minItems": least, "maxItems": least + 2}
    names = choices.sample(["id", "name", "ä", 'q"', "list", "a b"], choices.randrange(1, 5))
    found = {"type": "object", "properties": {name: schema(choices, depth - 1) for name in names}}
    found["required"] = [name for name in names if choices.random() < 0.6]
    return found | choices.choice([{}, {"additionalProperties": False}, {"additionalProperties": schema(choices, 0)}])


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
@pytest.mark.parametrize("part", range(10))
def test_every_completed_answer_is_valid(part):
    completed = 0
    for number in range(25):
        choices = random.Random(25 * part + number)
        wanted = schema(choices)
        text = answer(choices, byte_matcher("json-schema", json.dumps(wanted)))
        if text is not None:
            completed += 1
            jsonschema.Draft202012Validator(wanted).validate(json.loads(text.decode()))
    assert completed >= 12
