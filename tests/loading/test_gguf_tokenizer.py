"""Tokenizers built from GGUF metadata, against transformers' tokenizers with the same vocabulary."""

import json

import pytest

from offload.architecture.families import GGUF_FAMILIES
from offload.errors import CheckpointError, UnsupportedModel
from offload.loading.tokenizers.gguf_tokenizer import PATTERNS, end_of_turn_ids, tokenizer_from_metadata
from tests.loading.test_tokenizer_files import sentencepiece
from tests.support.models import SPECIAL, make_tokenizer
from tests.support.paths import DATA

BOOK = (DATA / "moby-dick-opening.txt").read_text("utf-8")[:20000]


def metadata(pre="gpt-2", **changes):
    """Return the values that a file has for the tests' tokenizer, which splits a text as GPT-2's."""
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


def ids(text, special=False, **changes):
    return tokenizer_from_metadata(metadata(**changes).get).encode(text, special)


def test_a_book_has_the_tokens_of_transformers():
    assert ids(BOOK) == make_tokenizer().encode(BOOK)


@pytest.mark.parametrize(
    ("changes", "text", "expected"),
    [
        ({"token_type": None}, "<|im_end|>a", [2, 67]),
        ({"token_type": [1] * len(metadata()["tokenizer.ggml.tokens"])}, "<|im_end|>a", [2, 67]),
        ({"bos_token_id": 2**32 - 1, "add_bos_token": True}, "a", [67]),
    ],
)
def test_what_a_file_leaves_out_is_the_formats_default(changes, text, expected):
    assert ids(text, special=True, **changes) == expected


def test_a_merge_may_begin_with_a_blank():
    values = metadata()
    tokens, merges = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"]
    changes = {"tokens": [*tokens, " ", " a"], "merges": [*merges, "  a"], "token_type": None}
    assert ids("a", **changes) == [67]


def test_a_template_for_tools_is_read():
    values = metadata() | {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    template = tokenizer_from_metadata((values | {"tokenizer.chat_template": "a"}).get).chat_template
    assert (template.text(), template.text(with_tools=True)) == ("a", "{{ tools }}")


@pytest.mark.parametrize("has_prefix", [None, False])
def test_sentencepiece_has_the_tokens_of_transformers(has_prefix):
    """A word's pieces are merged by their scores; what no piece spells is written in bytes."""
    raw = sentencepiece()
    pieces = sorted(raw.get_vocab(), key=raw.get_vocab().get)
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    scores = [0.0] * 259 + [-float(at) for at in range(len(pieces) - 259)]
    values = {"model": "llama", "tokens": pieces, "token_type": kinds, "scores": scores, "add_space_prefix": has_prefix}
    values |= {"unknown_token_id": 0, "merges": None, "pre": "default"}
    ours = tokenizer_from_metadata(metadata(**values).get)
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id", "scores"))
    assert tokenizer_from_metadata(metadata(**values | absent).get).encode("the") == ours.encode("the")
    for text in ("the  thé", "th</s>the\n", "漢 t", ""):
        expected = raw.encode(text).ids
        if has_prefix is None:
            assert ours.encode(text) == expected
            assert ours.decode(expected) == raw.decode(expected)
    assert ours.encode("the", False)[0] == raw.token_to_id("▁th" if has_prefix is None else "th")


def test_patterns_differ_in_how_digits_and_words_are_split():
    merges = {"tokens": [*metadata()["tokenizer.ggml.tokens"], "12", "34", "1234", "aB"]}
    merges |= {"merges": ["1 2", "3 4", "12 34", "a B"], "token_type": [1] * len(merges["tokens"])}
    counts = {pre: len(ids("1234", pre=pre, **merges)) for pre in ("gpt-2", "llama-bpe", "smollm", "deepseek-coder")}
    assert counts == {"gpt-2": 1, "llama-bpe": 3, "smollm": 4, "deepseek-coder": 4}
    words = {pre: len(ids("aB", pre=pre, **merges)) for pre in ("qwen2", "gpt-4o", "tekken")}
    assert words == {"qwen2": 1, "gpt-4o": 2, "tekken": 2}


def test_every_pattern_keeps_every_text():
    text = "It's 1,234.5 km — naïve\r\n\r\n  Ünïcode漢字かな한글 ελ 𝒳 x=y;\t!\n"
    for pre in PATTERNS:
        tokenizer = tokenizer_from_metadata(metadata(pre=pre).get)
        assert tokenizer.decode(tokenizer.encode(text, False)) == text


@pytest.mark.parametrize("pre", ["command-r", "qwen2"])
def test_characters_are_composed_where_the_models_own_tokenizer_does_it(pre):
    assert ids("e\u0301", pre=pre) == ids("é", pre=pre) != ids("e\u0301")


@pytest.mark.parametrize(
    ("changes", "begins"),
    [({"add_bos_token": True}, True), ({}, False), ({"pre": "llama-bpe"}, True), ({"pre": "tekken"}, True)],
)
def test_a_beginning_is_added_where_the_file_or_the_format_says_so(changes, begins):
    assert ids("a", special=True, **changes) == [*[1] * begins, *ids("a", **changes)]
    assert ids("a", special=True, **changes | {"add_bos_token": False}) == ids("a", **changes)


def test_names_outside_the_byte_alphabet_are_the_files_own():
    tokens = metadata()["tokenizer.ggml.tokens"]
    changes = {"tokens": [*tokens, "<｜User｜>"], "token_type": [1] * len(tokens) + [4]}
    assert ids("<｜User｜>a", **changes) == [len(tokens), *ids("a")]


def test_well_known_control_tokens_end_a_turn():
    tokens, control = ["<|im_end|>", "a", "<|end|>", "<EOT>"], [3, 1, 4, 1]
    assert end_of_turn_ids(metadata(tokens=tokens, token_type=control).get) == [0, 2, 3]
    assert end_of_turn_ids(metadata(tokens=tokens, token_type=None).get) == [0, 2, 3]
    template = "{% for m in messages %}<U>{{ m.content }} {% if m.role == 'assistant' %}<E>\n{% endif %}{% endfor %}"
    other = metadata(tokens=["<U>", "a", "<E", "<E>", "<EOT>"], token_type=[3, 1, 3, 4, 3])
    assert end_of_turn_ids((other | {"tokenizer.chat_template": template}).get) == [3, 4]
    assert end_of_turn_ids((other | {"tokenizer.chat_template": template + "{% if %}"}).get) == [4]
    harmony = [*tokens, "<|return|>", "<|call|>"]
    assert end_of_turn_ids(metadata(tokens=harmony, token_type=[*control, 3, 3]).get) == [0, 3, 4, 5]


def test_the_pre_tokenizers_of_all_families_are_known():
    """By architecture, as llama.cpp's converter writes them; "" for SentencePiece."""
    known = {
        **{"llama": "llama-bpe", "smollm3": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"},
        **{"phi3": "gpt-4o", "gpt-oss": "gpt-4o", "granite": "refact", "granitemoe": "refact", "olmo2": "dbrx"},
        **{"olmoe": "olmo", "glm4": "glm4", "glm4moe": "glm4", "starcoder2": "starcoder", "exaone4": "exaone4"},
        **{"command-r": "command-r", "cohere2": "command-r", "seed_oss": "seed-coder", "deepseek2": "deepseek-v3"},
        **dict.fromkeys(("gemma2", "gemma3", "ernie4_5"), ""),
    }
    assert set(GGUF_FAMILIES) <= set(known) and set(known.values()) <= {"", *PATTERNS}


@pytest.mark.parametrize("changes", [{"pre": "unheard-of"}, {"model": "t5"}, {"model": None}])
def test_other_tokenizers_are_refused_by_name(changes):
    with pytest.raises(UnsupportedModel, match=r"unheard-of|None|t5"):
        tokenizer_from_metadata(metadata(**changes).get)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": None}, {"merges": ["no such pair"]}, {"token_type": [1]}, {"eos_token_id": 10**6}, {"merges": [3]}],
)
def test_damaged_metadata_are_one_clear_error(changes):
    with pytest.raises(CheckpointError):
        tokenizer_from_metadata(metadata(**changes).get)
