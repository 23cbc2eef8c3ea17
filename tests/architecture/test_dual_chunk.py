"""Models with dual chunk attention (Qwen2.5-1M): full attention as far as it is the same, and a refusal beyond."""

import json
from dataclasses import replace

import pytest

from offload import EngineConfig, open_model
from offload.architecture.hf_config import read_shape, shape_from_config
from offload.architecture.known_models import KNOWN
from offload.architecture.yarn import stretched
from offload.errors import CheckpointError, UnsupportedModel
from tests.support.command import assert_error
from tests.support.models import make_hf_model, make_tokenizer

# The part of Qwen2.5-7B-Instruct-1M's config.json that matters, and what it is for the tiny model here.
DUAL = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
SMALL = {"chunk_size": 64, "local_size": 8, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dual")
    make_hf_model("qwen2").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dual_chunk_attention_config": SMALL}))
    return folder


def shape_of(parameters, **config):
    dual = make_hf_model("qwen2", num_hidden_layers=1).config.to_dict() | {"max_position_embeddings": 1010000}
    dual |= {"dual_chunk_attention_config": parameters}
    return shape_from_config(dual | config, {})


def test_the_context_ends_where_attention_would_differ():
    shape = shape_of(DUAL)
    assert (shape.context, shape.dual_chunk, shape.max_positions) == (262144, 262144, 1010000)
    assert shape_of({"chunk_size": 1000}).context == shape_of(DUAL | {"chunk_size": 1000}).context == 1000
    assert shape_of(None).context == 1010000 and shape_of(None).dual_chunk is None
    for name in ("Qwen2.5-7B-1M", "Qwen2.5-14B-1M"):
        assert (KNOWN[name].context, KNOWN[name].dual_chunk) == (262144, True)


@pytest.mark.parametrize("wrong", [{"local_size": 8}, {"chunk_size": 0}, {"chunk_size": "many"}, [1], "yes"])
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(CheckpointError, match="dual_chunk_attention_config"):
        shape_of(wrong)


def test_longer_prompts_are_refused_with_the_reason(folder):
    opened = open_model(EngineConfig(str(folder), "cpu", "float32"))
    assert opened.new_tokens(40, 24, exact=True) == 24
    assert opened.new_tokens(40, 500, exact=False) == 24
    for tokens, exact in ((64, False), (40, True)):
        with pytest.raises(UnsupportedModel, match="beyond 64 tokens this model needs dual chunk attention"):
            opened.new_tokens(tokens, 30, exact=exact)
    with pytest.raises(UnsupportedModel, match="dual chunk attention"):
        opened.stretched(100)
    with pytest.raises(UnsupportedModel, match="dual chunk attention"):
        stretched(replace(opened.checkpoint.shape, context=64), 2)
    assert opened.stretched(60) is opened


def test_plans_say_so_too(folder, triforce_here):
    shape = read_shape(folder / "config.json")
    assert (shape.context, shape.dual_chunk) == (64, 64)
    for more in ((), ("--extend-context",)):
        answer = triforce_here("profile", "--gpu", "h100", "--model", "Qwen2.5-7B-1M", "--context", "1M", *more)
        assert_error(answer, 2, "1,048,576 tokens do not fit", "beyond 262,144 tokens", "dual chunk attention")
    answer = triforce_here("generate", "Once " * 70, "-n", "4", "--model", str(folder), "--raw")
    assert answer.returncode == 2 and "dual chunk attention" in answer.stderr
