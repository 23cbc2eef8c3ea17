"""Tokenizers built from GGUF metadata, against transformers' tokenizer with the same vocabulary."""

import json

import pytest

from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.tokenizers.gguf_tokenizer import tokenizer_from_metadata
from tests.support.models import SPECIAL, make_tokenizer
from tests.support.paths import DATA


def metadata(pre="gpt-2", **changes):
    """Return what a file has for the tests' tokenizer, which splits a text as GPT-2's."""
    model = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (values | changes).items()}


def ids(text, **changes):
    return tokenizer_from_metadata(metadata(**changes).get).encode(text, special_tokens=True)


def test_a_book_has_the_tokens_of_transformers():
    text = (DATA / "moby-dick-opening.txt").read_text("utf-8")[:20000]
    assert ids(text) == make_tokenizer().encode(text)


def test_patterns_differ_in_how_digits_are_split():
    merges = {"tokens": [*metadata()["tokenizer.ggml.tokens"], "12", "1234"], "merges": ["1 2", "12 34"]}
    merges |= {"tokens": [*merges["tokens"], "34"], "merges": ["1 2", "3 4", "12 34"]}
    merges |= {"token_type": [1] * len(merges["tokens"])}
    counts = {pre: len(ids("1234", pre=pre, **merges)) for pre in ("gpt-2", "llama-bpe", "refact")}
    assert counts == {"gpt-2": 1, "llama-bpe": 3, "refact": 4}


@pytest.mark.parametrize("pre", ["command-r", "qwen2"])
def test_characters_are_composed_where_the_models_own_tokenizer_does_it(pre):
    assert ids("e\u0301", pre=pre) == ids("é", pre=pre) != ids("e\u0301")


def test_a_beginning_is_added_where_the_file_says_so():
    assert ids("a", add_bos_token=True) == [1, *ids("a")]


@pytest.mark.parametrize("changes", [{"pre": "unheard-of"}, {"pre": None}, {"model": "llama"}])
def test_other_tokenizers_are_refused_by_name(changes):
    with pytest.raises(UnsupportedModel, match=r"unheard-of|None|llama"):
        tokenizer_from_metadata(metadata(**changes).get)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": None}, {"merges": ["no such pair"]}, {"token_type": [1]}, {"eos_token_id": 10**6}, {"merges": [3]}],
)
def test_damaged_metadata_are_one_clear_error(changes):
    with pytest.raises(CheckpointError):
        tokenizer_from_metadata(metadata(**changes).get)
