"""Draft models and caches that do not go with a model: refused before anything is loaded."""

import pytest

from offload import EngineConfig, Speculation, open_model
from offload.errors import SettingsError
from offload.offloading import TierSettings
from offload.prompt_cache.folder import PromptFolder
from tests.support.models import make_hf_model, make_tokenizer


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_model_dir, tmp_path):
    make_hf_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"268 tokens .* 267; id 267 is '<other>' .* None"):
        open_model(EngineConfig(model=str(tiny_model_dir)), speculation=Speculation("naive", str(tmp_path)))


def test_a_window_beyond_the_draft_s_context_is_refused(tiny_model_dir, draft_model_dir):
    wanted = Speculation("naive", str(draft_model_dir), window=4000)
    with pytest.raises(SettingsError, match="2,048 tokens is shorter than its cache"):
        open_model(EngineConfig(model=str(tiny_model_dir)), speculation=wanted)


def test_quantised_keys_and_values_are_neither_offloaded_nor_cached_on_disk(tiny_model_dir, tmp_path):
    opened = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", kv="q8"))
    prompts = opened.prompt_cache(PromptFolder(tmp_path, 1000))
    for more in ({"tiers": TierSettings("stream", 0, link_gb_s=1.0)}, {"prompts": prompts}):
        with pytest.raises(SettingsError, match="--kv q8 is for keys and values in memory"):
            opened.load(**more)
