"""Long texts encoded piece by piece: the ids are those of the whole text, or the text is not cut."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from offload.loading.tokenizers import tokenizer as tokenizer_module
from offload.loading.tokenizers.text_pieces import LLAMA3_PATTERN, QWEN_PATTERN, can_cut, pieces
from offload.loading.tokenizers.tokenizer import Tokenizer

BOOK = (Path(__file__).parents[2] / "examples" / "frankenstein.txt").read_text("utf-8")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
ADDED = [AddedToken("<r>", rstrip=True), AddedToken("<l>", lstrip=True), AddedToken("he", single_word=True), "\n\n\n"]
AWKWARD = [
    "a",
    "he",
    "Don't ",
    "we'LL",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\r\n",
    "\t",
    "\xa0",
    "\u2028",
    "\x1c",
    "1",
    "²",
    "Ⅷ",
]
AWKWARD += ["e\u0301", "\u0301", "i\u0307", "漢字", "😀", "ﬁ", "_", ".", "...\n", "\x85", "<r>", "<l>"]


def split_by(pattern):
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt2": BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "qwen": split_by(QWEN_PATTERN),
    "llama3": split_by(LLAMA3_PATTERN),
}


def trained(pre_tokenizer):
    backend = RawTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([BOOK[:30_000]], trainer)
    backend.add_tokens(ADDED)
    return backend


BACKENDS = {name: trained(each) for name, each in PRE_TOKENIZERS.items()}
BACKENDS["qwen"].normalizer = normalizers.NFC()


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def of_pieces(backend, text, size):
    return [token for piece in pieces(text, size) for token in backend.encode(piece, add_special_tokens=False).ids]


def test_the_ids_of_a_book_are_those_of_the_whole(backend):
    assert can_cut(backend)
    text = BOOK[:60_000]
    assert len(list(pieces(text, 1000))) > 45
    assert of_pieces(backend, text, 1000) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(AWKWARD), max_size=30).map("".join), st.integers(0, 3))
def test_the_ids_of_awkward_texts_are_those_of_the_whole(name, text, size):
    assert "".join(pieces(text, size)) == text
    assert of_pieces(BACKENDS[name], text, size) == BACKENDS[name].encode(text, add_special_tokens=False).ids


def test_special_tokens_stand_around_the_whole_text_and_progress_is_reported(monkeypatch, backend):
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.post_processor = template
    one = Tokenizer(backend, None, {})
    text, seen = BOOK[:5000], []
    whole = one.encode(text, True, lambda *at: seen.append(at))
    assert not seen and (whole[0], whole[-1]) == (1, 2)
    monkeypatch.setattr(tokenizer_module, "PIECE", 1000)
    assert one.encode(text, True, lambda *at: seen.append(at)) == whole
    assert one.encode(text, False) == whole[1:-1]
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == (5000, 5000)


def test_texts_that_pieces_could_change_are_not_cut():
    for changes in (
        {"pre_tokenizer": pre_tokenizers.Metaspace(split=False)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"pre_tokenizer": split_by(r"\w+\s?|.")},
        {"normalizer": normalizers.Strip()},
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
        {"token": "of the"},
        {"token": AddedToken("mask", rstrip=True)},
        {"token": AddedToken(" x", single_word=True)},
    ):
        backend = RawTokenizer.from_str(BACKENDS["gpt2"].to_str())
        for name, value in changes.items():
            backend.add_tokens([value]) if name == "token" else setattr(backend, name, value)
        assert not can_cut(backend)
