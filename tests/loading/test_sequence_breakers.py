"""The tokens that contain a text, in the spellings of both kinds of vocabularies."""

from offload.loading.tokenizers.vocabulary import tokens_containing
from offload.settings.generation import DRY_BREAKERS


def test_tokens_are_found_in_every_spelling():
    vocabulary = {"a": 0, "\n": 1, "Ċ": 2, "ĊĊ": 3, "<0x0A>": 4, ',"': 5, ":": 6, "Ġ": 7, "▁*": 8, "<0x0B>": 9, "n": 10}
    assert tokens_containing(vocabulary, DRY_BREAKERS) == {1, 2, 3, 4, 5, 6, 8}
