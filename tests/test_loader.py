"""Draft models and caches that do not go with a model: refused before anything is loaded."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from offload import EngineConfig, Speculation, open_model
from offload.errors import SettingsError
from tests.support.models import FAMILY_CASES, make_hf_model, make_tokenizer


def with_draft(model_dir, folder, tokenizer, **changes):
    """Open a model with a draft model of some tokenizer."""
    make_hf_model("llama", num_hidden_layers=1, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = EngineConfig(model=str(model_dir), dtype="float32", device="cpu")
    return open_model(config, speculation=Speculation("naive", str(folder), sink=4, window=64))


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_model_dir, tmp_path):
    other = make_tokenizer(alphabet=sorted(ByteLevel.alphabet(), reverse=True))
    with pytest.raises(SettingsError) as caught:
        with_draft(tiny_model_dir, tmp_path, other)
    assert "267 tokens where the target has 267, and 256 ids are not the same" in caught.value.message
    assert "the first is 3, 'Ń' where the target has '!'" in caught.value.message
    assert "--draft lookup" in caught.value.hint


def test_what_a_draft_model_must_not_propose(tiny_model_dir, draft_model_dir, tmp_path):
    more = make_tokenizer(special=("<|endoftext|>", "<|im_start|>", "<think>"))
    more.add_tokens(["<other>"])
    assert with_draft(tiny_model_dir, tmp_path, more, vocab_size=300).barred == [2, 267]
    same = Speculation("naive", str(draft_model_dir), sink=4, window=64)
    assert open_model(EngineConfig(model=str(tiny_model_dir)), speculation=same).barred == []


def test_a_known_model_that_drafts_is_named(llama_dir, tmp_path):
    make_tokenizer().save_pretrained(llama_dir)
    hint = ""
    for name in ("Qwen3-8B", "llama"):
        (folder := tmp_path / name).symlink_to(llama_dir)
        other = make_tokenizer(alphabet=sorted(ByteLevel.alphabet(), reverse=True))
        with pytest.raises(SettingsError) as caught:
            with_draft(folder, tmp_path / "draft", other)
        hint += caught.value.hint
    assert hint.count("--draft Qwen3-0.6B") == 1 and "smaller model of the same family" in hint


def test_a_window_beyond_the_draft_s_context_is_refused(tiny_model_dir, draft_model_dir):
    wanted = Speculation("naive", str(draft_model_dir), window=4000)
    with pytest.raises(SettingsError, match="2,048 tokens is shorter than its cache"):
        open_model(EngineConfig(model=str(tiny_model_dir)), speculation=wanted)


@pytest.mark.parametrize(("name", "why"), [("gemma2", "caps attention scores"), ("gpt-oss", "has attention sinks")])
def test_quantised_keys_are_refused_where_attention_to_them_lacks_what_the_model_needs(tmp_path, name, why):
    family, changes = FAMILY_CASES[name]
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    make_hf_model(family, **changes | {"vocab_size": len(tokenizer)}).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=why):
        open_model(EngineConfig(str(tmp_path), device="cpu", kv="q8"))


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Speculation("lookup", tree="8"), "--tree 8 does not work with linear attention"),
        (Speculation("ar", approximate="h2o"), "--approximate h2o does not work with qwen3_5_text"),
    ],
)
def test_what_linear_attention_does_not_have_is_refused_before_weights_are_read(tmp_path, wanted, why):
    family, changes = FAMILY_CASES["qwen3.5"]
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    make_hf_model(family, **changes | {"vocab_size": len(tokenizer)}).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=why):
        open_model(EngineConfig(str(tmp_path), device="cpu"), speculation=wanted)
