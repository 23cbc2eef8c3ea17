"""scripts/small_model.py: the first layers of models in both formats load, and compute what those layers compute."""

import pytest
import torch
from transformers import LlamaForCausalLM

from offload import EngineConfig, GenerationConfig, Sampling, Tokens, open_model
from scripts.small_model import first_layers, write_small_model
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer


def test_per_layer_lists_of_a_config_are_cut_and_nested_configs_too():
    config = {"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "eos_token_id": [1, 2]}}
    assert first_layers(config, 2) == {
        "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"], "eos_token_id": [1, 2]}
    }


@pytest.mark.parametrize("is_gguf", [False, True])
def test_the_first_layer_of_a_model(tmp_path, is_gguf):
    model = make_hf_model("llama")
    source, target = tmp_path / ("model.gguf" if is_gguf else "model"), tmp_path / ("one.gguf" if is_gguf else "one")
    if is_gguf:
        write_gguf(source, model, tokenizer=make_tokenizer())
    else:
        model.save_pretrained(source, max_shard_size="40KB")
        make_tokenizer().save_pretrained(source)
    write_small_model(source, 1, target)
    model.model.layers = model.model.layers[:1]
    ids = list(range(3, 40))
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :]
    engine = open_model(EngineConfig(model=str(target), dtype="float32", device="cpu")).load()
    events = engine.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=8))
    assert [id_ for event in events if isinstance(event, Tokens) for id_ in event.ids] == expected.tolist()


def test_more_layers_than_there_are(tmp_path):
    LlamaForCausalLM(make_hf_model("llama").config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot keep 9 layers of"):
        write_small_model(tmp_path / "model", 9, tmp_path / "out")
