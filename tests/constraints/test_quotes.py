"""Quotations that are literal: masks against a slow definition, and where the document has them."""

import random

from offload.constraints.quotes import QuotableTokens, Quotation, QuoteMatcher, quotations
from offload.constraints.vocabulary import ConstraintVocabulary
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.settings.constraint import Constraint
from tests.support.models import make_tokenizer

DOCUMENT = 'The whale was white;\n  the "sea" was not white, über alles.'
TOKENS = ["T", "h", "e", " ", "the", "whale", " w", "white", '"', ' "', '";', '."', 'e"', '""', "ü", ", ", "“", "x"]
BYTES = [each.encode() for each in TOKENS] + [b"\xc3", b"\xbc", b"\xe2\x80", b"\x9c", b"", b"<end>"]
END = len(BYTES) - 1


def is_beginning(answer):
    """Return whether bytes may be the beginning of an answer, by looking at all of it."""
    parts = answer.split(b'"')
    text = " ".join(DOCUMENT.split()).encode()
    inside, closed = parts[1::2], parts[1:-1:2]
    whole = all(is_text(each) for each in closed) and all(is_text(each[:1]) or each[0] >= 0xC0 for each in inside)
    is_literal = all(each in text for each in inside) and all(each.strip() for each in closed)
    return is_literal and whole and "“".encode() not in b"|".join(parts[::2])


def is_text(data):
    return "\ufffd" not in data.decode("utf-8", "replace")


def test_what_may_follow_is_what_the_definition_allows():
    choices, matcher = random.Random(3), QuoteMatcher(DOCUMENT, QuotableTokens(BYTES), END)
    seen = set()
    for _ in range(60):
        walk, answer = matcher.fork(), b""
        for _ in range(8):
            allowed = walk.allowed()
            expected = [bool(each) and is_beginning(answer + each) for each in BYTES[:-1]]
            assert list(allowed[:-1]) == expected, answer
            assert bool(allowed[END]) == (answer.count(b'"') % 2 == 0 and not answer.endswith(b"\xe2\x80"))
            token = choices.choice([token for token in allowed.nonzero()[0] if token != END])
            assert walk.consume(token)
            answer += BYTES[token]
            seen.add(answer.count(b'"'))
        walk.rollback(3)
        assert walk.allowed() is not None
    assert {0, 1, 2, 3} <= seen


def test_a_special_token_whose_name_the_document_has_is_no_part_of_a_quotation():
    tokenizer = Tokenizer.from_transformers(make_tokenizer())
    vocabulary = ConstraintVocabulary(lambda: tokenizer, len(tokenizer.vocabulary), [0])
    masks = vocabulary.masks(Constraint("quote", "Say <|im_start|> first."), [])
    mark, less = tokenizer.encode('"', False) + tokenizer.encode("<", False)
    masks.observe([mark])
    allowed = masks.allowed(())
    assert allowed[less] and not allowed[tokenizer.special_ids["<|im_start|>"]]


def test_places_are_those_of_the_document_whatever_its_blanks():
    answer = 'It says "white; the" and then "sea", not "never".'
    found = list(quotations(answer, DOCUMENT))
    assert found == [Quotation("white; the", 14, 26), Quotation("sea", 28, 31), Quotation("never", -1, -1)]
    assert DOCUMENT[14:26] == "white;\n  the"
