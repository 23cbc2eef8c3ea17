"""Plans of models with linear attention: states of one size, and keys and values of the other layers alone."""

import json
from dataclasses import replace

import pytest
import torch

from offload.architecture.hf_config import read_shape
from offload.caches.recurrent_states import States
from offload.planning.plan import make_plan
from offload.settings.config import Speculation
from tests.support.planning import parts_on_cpu, request

QWEN3_NEXT_80B = {  # its published config.json, but for switches
    "model_type": "qwen3_next",
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
}
EACH = 2 * 2 * 256 * 2  # bytes of keys and values of a layer and token


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B))
    return read_shape(tmp_path / "config.json")


@pytest.mark.parametrize("tokens", [1000, 200_000])
def test_states_do_not_grow_with_the_sequence(shape, tokens):
    one, two = (parts_on_cpu(shape, tokens, Speculation("ar"), sequences=count)["KV cache"] for count in (1, 2))
    assert one == 12 * EACH * tokens + shape.state_bytes(2)
    assert two == 2 * one
    for method in ("retrieval", "auto"):  # the selected cache has them once more
        drafting = parts_on_cpu(shape, tokens, Speculation(method, budget=64))
        assert drafting["retrieval cache"] > shape.state_bytes(2)


def test_the_bytes_of_states_are_those_that_are_allocated(shape):
    states = States(replace(shape.linear, layers=1), torch.bfloat16, torch.device("meta"))
    assert 36 * states.nbytes == shape.state_bytes(2)
    assert 0.3 < shape.state_bytes(2) / 2**30 < 0.5


def test_a_plan_offloads_keys_and_values_but_no_weights(shape):
    small = replace(request(), shape=replace(shape, experts=replace(shape.experts, count=16)), tokens=200_000)
    plan = make_plan(small)
    assert plan.placed.weight_layers == 48
    host = make_plan(replace(small, placement=replace(small.placement, resident_layers=4))).host.parts["KV cache"]
    assert abs(host - 8 * EACH * 200_000) < 0.02 * host
    whole = replace(small, shape=shape)
    assert not make_plan(replace(whole, placement=replace(whole.placement, experts="device"))).fits
