"""Quotations that are literal: masks against a slow definition, and where the document has them."""

import random
import time

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
    free = b"|".join(parts[::2])
    whole = all(is_text(each) for each in closed) and all(is_text(each[:1]) or each[0] >= 0xC0 for each in inside)
    return (
        all(each in text for each in inside)
        and all(each.strip() for each in closed)
        and whole
        and "“".encode() not in free
    )


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


def test_a_token_that_is_not_allowed_changes_nothing():
    walk = QuoteMatcher(DOCUMENT, QuotableTokens(BYTES), END).fork()
    assert walk.consume(TOKENS.index('"')) and not walk.consume(TOKENS.index("x"))
    assert walk.consume(TOKENS.index("white")) and walk.consume(TOKENS.index('";'))


def test_a_special_token_whose_name_the_document_has_is_no_part_of_a_quotation():
    tokenizer = Tokenizer.from_transformers(make_tokenizer())
    vocabulary = ConstraintVocabulary(lambda: tokenizer, len(tokenizer.vocabulary), [0])
    masks = vocabulary.masks(Constraint("quote", "Say <|im_start|> first."), [])
    mark, less = tokenizer.encode('"', False) + tokenizer.encode("<", False)
    masks.observe([mark])
    allowed = masks.allowed(())
    assert allowed[less] and not allowed[tokenizer.special_ids["<|im_start|>"]]


def test_the_masks_that_are_kept_do_not_grow_with_what_is_quoted():
    document = bytes(range(97, 123)).decode() * 40
    tokens = QuotableTokens([*(bytes([each]) for each in range(97, 123)), b'"', b"<end>"])
    walk, other = QuoteMatcher(document, tokens, 27), QuoteMatcher("another document", tokens, 27)
    for token in (26, *[each % 26 for each in range(1000)], 26):
        assert walk.allowed()[token] and walk.consume(token)
    assert len(walk._masks) == 2 and walk._quotable is other._quotable


def test_the_masks_of_a_long_document_come_at_once():
    """To try every length of a token at every place takes 20 s for half a megabyte."""
    choices = random.Random(0)
    words = ["".join(choices.choices("etaoin", k=4)) for _ in range(400)]
    tokens = QuotableTokens([b'"', *map(str.encode, dict.fromkeys(words)), b" ", b"<end>"])
    walk = QuoteMatcher(" ".join(choices.choices(words, k=10_000)), tokens, len(tokens.data) - 1)
    assert walk.consume(0)
    start = time.process_time()
    assert walk.allowed().sum() == len(tokens.data) - 2
    assert time.process_time() - start < 0.5


def test_places_are_those_of_the_document_whatever_its_blanks():
    answer = 'It says "white; the" and then "sea", not "never".'
    found = list(quotations(answer, DOCUMENT))
    assert found == [Quotation("white; the", 14, 26), Quotation("sea", 28, 31), Quotation("never", -1, -1)]
    assert DOCUMENT[14:26] == "white;\n  the"
