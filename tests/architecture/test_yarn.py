"""A stretched context: the logits of transformers' YaRN, whole requests beyond the model's own length, and refusals."""

import warnings

import pytest
import torch

from offload import EngineConfig, open_model
from offload.architecture.hf_config import shape_from_config
from offload.architecture.yarn import factor_for, stretched
from offload.errors import PromptError, UnsupportedModel
from offload.loading.formats.safetensors import FolderCheckpoint
from tests.support.models import make_hf_model, make_tokenizer

LENGTH = 64
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def short_model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    make_hf_model("llama", max_position_embeddings=LENGTH).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_logits_are_those_of_transformers_yarn(short_model_dir):
    from transformers import AutoModelForCausalLM

    ids = torch.randint(267, (150,), generator=torch.Generator().manual_seed(1))
    yarn = DEFAULT | {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": LENGTH}
    reference = AutoModelForCausalLM.from_pretrained(short_model_dir, rope_parameters=yarn, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(short_model_dir, dtype=torch.float32)
    opened = open_model(EngineConfig(str(short_model_dir), "cpu", "float32")).stretched(151)
    assert opened.checkpoint.shape.context == 3 * LENGTH
    model = opened.load().model
    with torch.inference_mode():
        rows = model.forward(ids, model.new_cache(151, model.rope(151)))
        found = model.logits(rows)
        expected, other = reference(ids[None]).logits[0], plain(ids[None]).logits[0]
    assert torch.allclose(found, expected, atol=2e-3)
    assert not torch.allclose(found, other, atol=0.1)


def test_the_factor_is_whole_and_a_context_that_suffices_stays(short_model_dir):
    shape = FolderCheckpoint(short_model_dir).shape
    assert [factor_for(shape, tokens) for tokens in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]
    opened = open_model(EngineConfig(str(short_model_dir), "cpu", "float32"))
    assert opened.stretched(LENGTH) is opened
    before = opened.checkpoint.shape
    assert opened.stretched(LENGTH + 1).checkpoint.shape.context == 2 * LENGTH
    assert opened.checkpoint.shape is before and before.rope_type == "default"
    for model, is_offered in ((opened, True), (opened.stretched(LENGTH + 1), False)):
        for tokens in (1, 2 * LENGTH):
            with pytest.raises(PromptError) as short:
                model.new_tokens(tokens, 2 * LENGTH, exact=True)
            assert ("--extend-context" in short.value.hint) is is_offered


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("llama", {"rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("mistral", {"sliding_window": 32}, "window of 32"),
    ],
)
def test_what_cannot_be_stretched_is_refused(family, changes, word):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = shape_from_config(make_hf_model(family, **changes).config.to_dict(), {})
    with pytest.raises(UnsupportedModel, match=word) as refused:
        stretched(shape, 2)
    assert refused.value.hint
