"""Tokenizers loaded without transformers: tokenizer.json as it is, with the special tokens of the other files."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offload.errors import CheckpointError
from offload.loading.hub.download import open_checkpoint
from offload.loading.tokenizers import tokenizer_files
from offload.loading.tokenizers.tokenizer_files import load_tokenizer
from tests.support.models import SPECIAL, TEMPLATE, make_tokenizer

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([" ", "  ", "\n", "the", " the", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<extra>", "é"]),
    ),
    max_size=8,
).map("".join)


def byte_level(extra=()):
    """A byte-level BPE tokenizer with ChatML's special tokens."""
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.add_tokens(list(extra))
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


def truncating():
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9, pad_id=0, pad_token="<|endoftext|>")
    return tokenizer


LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FLAGS = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
DECODER = {str(token): FLAGS | {"content": content} for token, content in enumerate(SPECIAL)}
EXTRA = {"267": FLAGS | {"content": "<extra>", "special": False}}
GENERIC = {"eos_token": "<|im_end|>"}
CASES = {  # tokenizer.json, tokenizer_config.json and special_tokens_map.json
    "generic": (byte_level, GENERIC, None),
    "no config": (byte_level, None, None),
    "llama 2": (sentencepiece, LLAMA2, None),
    "added tokens": (byte_level, GENERIC | {"added_tokens_decoder": DECODER | EXTRA}, None),
    "new token": (byte_level, GENERIC | {"pad_token": "<pad>", "unk_token": "<unk>"}, None),
    "added, not special": (lambda: byte_level(["<extra>"]), GENERIC, None),
    "map": (byte_level, GENERIC, {"bos_token": {"content": "<s>", "normalized": False}}),
    "splits": (byte_level, GENERIC | {"split_special_tokens": True}, None),
    "truncates": (truncating, GENERIC, None),
    "templates": (byte_level, GENERIC | {"chat_template": [{"name": "default", "template": TEMPLATE}]}, None),
}


def write(folder, make, config, special):
    make().save(str(folder / "tokenizer.json"))
    if config is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def assert_equal(ours, theirs, text):
    """Encoding, offsets and decoding are those of transformers' tokenizer."""
    for special in (True, False):
        expected = theirs(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert ours.encode(text, special_tokens=special) == expected
        whole = theirs.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(expected) == whole
    if "<extra>" not in text:  # which is text for spans, though it is not called special
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        assert ours.spans(text) == plain["offset_mapping"]


@pytest.mark.parametrize("name", CASES)
def test_tokenizers_equal_those_of_transformers(name, tmp_path, monkeypatch):
    folder = write(tmp_path, *CASES[name])
    monkeypatch.setattr(tokenizer_files, "load_hf_tokenizer", None)  # ours must do without
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.vocabulary == theirs.get_vocab()

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(TEXTS)
    def check(text):
        assert_equal(ours, theirs, text)

    check()
    if theirs.chat_template:
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.chat("Who?", "Be brief.") == theirs(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.long  # transformers reads the GGUF for seven seconds
def test_the_embedded_model_has_the_tokenizer_of_transformers(embedded_model_dir):
    ours = open_checkpoint(embedded_model_dir).load_tokenizer()
    theirs = AutoTokenizer.from_pretrained(embedded_model_dir, gguf_file="model.gguf")
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)  # of SmolLM2's own tokenizer.json
    assert ours.vocabulary == theirs.get_vocab()
    for text in ("It was a dark and stormy night; the rain fell in torrents. 漢字 🎉\n" * 20, "<|im_end|> 1816"):
        assert_equal(ours, theirs, text)
    for system in (None, "Be brief."):
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": "Who?"})
        assert ours.chat("Who?", system) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_a_tokenizer_without_tokenizer_json_is_left_to_transformers(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(json.dumps({token: at for at, token in enumerate([*tokens, "th"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert load_tokenizer(tmp_path).encode("thin", False)[0] == len(tokens)


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "?"}}', "[]"])
def test_a_damaged_file_is_one_clear_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_template_file_takes_precedence(tmp_path):
    folder = write(tmp_path, *CASES["generic"])
    (folder / "chat_template.jinja").write_text("from the file: {{ messages[0]['content'] }}")
    ours = load_tokenizer(folder)
    assert ours.chat("Hello", None) == ours.encode("from the file: Hello", False)


def test_loading_imports_neither_torch_nor_transformers(tmp_path):
    folder = write(tmp_path, *CASES["generic"])
    code = (
        "import sys; from pathlib import Path; from offload.loading.tokenizers.tokenizer_files import load_tokenizer;"
        f"load_tokenizer(Path({str(folder)!r})).chat('Hello', None);"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
