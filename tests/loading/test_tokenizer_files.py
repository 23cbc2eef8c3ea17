"""Tokenizers loaded without transformers, against AutoTokenizer on the same files."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from offload.loading.tokenizers import tokenizer_files
from offload.loading.tokenizers.tokenizer_files import load_tokenizer
from tests.support.models import MERGES, SPECIAL, TEMPLATE

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([" ", "  ", "\n", "the", " the", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<extra>", "é"]),
    ),
    max_size=8,
).map("".join)


def byte_level(extra=()):
    """A byte-level BPE tokenizer with ChatML's special tokens."""
    pieces = [*SPECIAL, *BYTES, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL])
    tokenizer.add_tokens(list(extra))
    return tokenizer


def qwen():
    """A tokenizer as Qwen2's tokenizer.json describes it: NFC, then a regular expression."""
    tokenizer = byte_level([AddedToken("<extra>", normalized=False)])
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    return tokenizer


def sentencepiece():
    """A tokenizer as Llama 2's tokenizer.json describes it: pieces with byte fallback, and BOS."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "▁th"]
    merges = [("t", "h"), ("▁", "th")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def with_bos():
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def truncating():
    tokenizer = with_bos()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9, pad_id=0, pad_token="<|endoftext|>")
    return tokenizer


LLAMA2 = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
DECODER = {
    str(token): {"content": content, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    | {"single_word": False}
    for token, content in enumerate(SPECIAL)
}
EXTRA = {"267": DECODER["0"] | {"content": "<extra>", "special": False}}
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
# The family, tokenizer.json, tokenizer_config.json and special_tokens_map.json.
CASES = {
    "generic": ("llama", byte_level, GENERIC, None),
    "unnamed": ("llama", byte_level, {}, None),
    "no config": ("llama", byte_level, None, None),
    "backend": ("qwen3", byte_level, {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>"}, None),
    "llama 3": ("llama", with_bos, GENERIC | {"bos_token": "<|endoftext|>", "added_tokens_decoder": DECODER}, None),
    "byte-level llama": ("llama", byte_level, {"tokenizer_class": "LlamaTokenizerFast"}, None),
    "llama 2": ("llama", sentencepiece, LLAMA2 | {"legacy": False}, None),
    "llama 2, legacy": ("llama", sentencepiece, LLAMA2 | {"legacy": True, "add_prefix_space": None}, None),
    "llama 2, no prefix": ("llama", sentencepiece, LLAMA2 | {"add_prefix_space": False}, None),
    "mistral": ("mistral", sentencepiece, LLAMA2, None),
    "qwen2": ("qwen2", qwen, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}, None),
    "qwen2, generic": ("qwen2", byte_level, GENERIC, None),
    "qwen3": ("qwen3", qwen, {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": DECODER | EXTRA}, None),
    "qwen3, unnamed": ("qwen3", qwen, {}, None),
    "gpt2": ("llama", byte_level, {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>"}, None),
    "extra": ("llama", byte_level, GENERIC | {"additional_special_tokens": ["<extra>", "<|im_start|>"]}, None),
    "new token": ("llama", byte_level, GENERIC | {"pad_token": "<pad>", "unk_token": "<unk>"}, None),
    "added, not special": ("llama", lambda: byte_level(["<extra>"]), GENERIC, None),
    "map": ("llama", byte_level, GENERIC, {"bos_token": {"content": "<s>", "lstrip": True, "normalized": False}}),
    "add_bos_token": ("llama", byte_level, GENERIC | {"bos_token": "<|im_start|>", "add_bos_token": True}, None),
    "clean up": ("llama", with_bos, GENERIC | {"clean_up_tokenization_spaces": True}, None),
    "splits": ("llama", byte_level, GENERIC | {"split_special_tokens": True}, None),
    "truncates": ("llama", truncating, GENERIC, None),
    "templates": (
        "llama",
        byte_level,
        GENERIC | {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "x", "template": "x"}]},
        None,
    ),
}
# Families whose class of tokenizer does not follow from the files alone.
FAMILIES = {
    "phi3": ("phi3", sentencepiece, LLAMA2 | {"legacy": False}, None),
    "granite": ("granite", qwen, {"tokenizer_class": "GPT2Tokenizer"}, None),
    "olmo2": ("olmo2", qwen, {"tokenizer_class": "GPT2Tokenizer"}, None),
    "glm4": ("glm4", qwen, {"tokenizer_class": "GPT2Tokenizer"}, None),
    "starcoder2, unnamed": ("starcoder2", qwen, {}, None),
}
# What only transformers builds.
UNUSUAL = {
    "image token": ("llama", byte_level, GENERIC | {"image_token": "<extra>"}, None),
    "tokens by name": ("llama", byte_level, GENERIC | {"extra_special_tokens": {"image_token": "<extra>"}}, None),
    "cohere, unnamed": ("cohere", qwen, {}, None),
    "another class": ("llama", byte_level, {"tokenizer_class": "GPTNeoXTokenizer"}, None),
    "tokens of another file": ("qwen2", byte_level, GENERIC | {"added_tokens_decoder": {"0": DECODER["0"]}}, None),
}


def write(folder, family, make, config, special):
    make().save(str(folder / "tokenizer.json"))
    if config is not None:
        config = {"chat_template": TEMPLATE} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder, family


def assert_equal(ours, theirs, text):
    """Encoding, offsets, decoding and the chat are those of transformers' tokenizer."""
    for special in (True, False):
        expected = theirs(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert ours.encode(text, special_tokens=special) == expected
        assert ours.decode(expected) == theirs.decode(
            expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    plain = theirs(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    if "<extra>" not in text:
        assert ours.spans(text) == plain["offset_mapping"]
    else:  # a control token that is spelt out is text, though it is not called special
        start = text.index("<extra>")
        assert (start, start + len("<extra>")) not in ours.spans(text)


@pytest.fixture(params=CASES)
def loaded(request, tmp_path, monkeypatch):
    """Our tokenizer and transformers' from the same files."""
    folder, family = write(tmp_path, *CASES[request.param])
    monkeypatch.setattr(tokenizer_files, "load_hf_tokenizer", None)  # ours must do without
    return load_tokenizer(folder, family), AutoTokenizer.from_pretrained(folder)


def test_tokenizers_equal_those_of_transformers(loaded):
    ours, theirs = loaded
    assert ours.vocabulary == theirs.get_vocab()
    assert ours.has_chat_template == bool(theirs.chat_template)
    assert ours.decode(range(len(theirs))) == theirs.decode(range(len(theirs)), skip_special_tokens=True)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(TEXTS)
    def check(text):
        assert_equal(ours, theirs, text)

    check()
    if theirs.chat_template:
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.chat("Who?", "Be brief.") == theirs(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_class_of_transformers(name, tmp_path, monkeypatch):
    folder, family = write(tmp_path, *FAMILIES[name])
    monkeypatch.setattr(tokenizer_files, "load_hf_tokenizer", None)
    assert_equal(load_tokenizer(folder, family), AutoTokenizer.from_pretrained(folder), "  the e\u0301 12 don't\n\n")


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tokenizers_are_left_to_transformers(name, tmp_path):
    folder, family = write(tmp_path, *UNUSUAL[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(tokenizer_files._Unusual):
        tokenizer_files._load(folder, family)
    assert_equal(load_tokenizer(folder, family), theirs, "the <extra> é<|im_end|> end")


def test_the_embedded_model_has_the_tokenizer_of_transformers(embedded_model_dir, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "load_hf_tokenizer", None)
    ours, theirs = load_tokenizer(embedded_model_dir, "llama"), AutoTokenizer.from_pretrained(embedded_model_dir)
    assert ours.vocabulary == theirs.get_vocab()

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(TEXTS)
    def check(text):
        assert_equal(ours, theirs, text)

    check()
    assert_equal(ours, theirs, "It was a dark and stormy night; the rain fell in torrents. 漢字 🎉\n" * 20)
    for system in (None, "Be brief."):
        chat = [{"role": "user", "content": "Who?"}]
        chat = chat if system is None else [{"role": "system", "content": system}, *chat]
        assert ours.chat("Who?", system) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_a_template_file_takes_precedence(tmp_path):
    folder, family = write(tmp_path, *CASES["generic"])
    (folder / "chat_template.jinja").write_text("from the file: {{ messages[0]['content'] }}")
    expected = AutoTokenizer.from_pretrained(folder)("from the file: Hello", add_special_tokens=False)["input_ids"]
    assert load_tokenizer(folder, family).chat("Hello", None) == expected


def test_loading_imports_neither_torch_nor_transformers(tmp_path):
    folder, family = write(tmp_path, *CASES["llama 3"])
    code = (
        "import sys; from pathlib import Path; from offload.loading.tokenizers.tokenizer_files import load_tokenizer;"
        f"load_tokenizer(Path({str(folder)!r}), {family!r}).chat('Hello', None);"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
