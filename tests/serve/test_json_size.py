"""What the JSON of a request may be made of, counted before it is parsed."""

import json
import random

import pytest

from triforce_cli.serve import bodies
from triforce_cli.serve.api_errors import ApiError
from triforce_cli.serve.bodies import MOST_PARTS, check_json

ITEMS = 1000


def is_allowed(text, items=ITEMS):
    try:
        check_json(text.encode(), items)
    except ApiError:
        return False
    return True


def test_what_takes_far_more_memory_than_its_text_is_refused():
    assert not is_allowed("[" + "[]," * MOST_PARTS + "[]]", items=10**9)
    assert not is_allowed("[" * (MOST_PARTS + 1))
    assert not is_allowed(json.dumps({str(number): 0 for number in range(MOST_PARTS)}), items=10**9)
    assert not is_allowed("[" + "1," * (ITEMS + 1) + "1]")
    assert is_allowed(json.dumps({"prompt": list(range(ITEMS))}))


def test_texts_are_not_counted_however_they_are_escaped(monkeypatch):
    rng, pieces = random.Random(0), ("\\", '"', ",", "[", "{", ":", "é", "\n", "a" * 20)
    for size in (1, 7, 64):
        monkeypatch.setattr(bodies, "_PIECE", size)
        for _ in range(50):
            text = "".join(rng.choices(pieces, k=60))
            data = json.dumps([text, text, 1], ensure_ascii=rng.random() < 0.5)
            assert is_allowed(data, items=2) and not is_allowed(data, items=1)


@pytest.mark.parametrize("text", ["", '"', "\\", '"\\', "\x00", '"\\"'])
def test_what_is_no_json_is_left_to_the_parser(text):
    assert is_allowed(text)
