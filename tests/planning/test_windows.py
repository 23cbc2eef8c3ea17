"""Plans of models some of whose layers attend to a window: only the others' keys and values grow, and are offloaded."""

import json
from dataclasses import replace

import pytest
import torch

from offload.architecture.dims import WINDOW_SLACK
from offload.architecture.hf_config import read_shape
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.planning.plan import make_plan
from offload.settings.config import Speculation
from tests.support.models import make_hf_model
from tests.support.planning import parts_on_cpu, request

GEMMA_3_27B = {  # what its published config.json has beside transformers' defaults
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
EACH = 2 * 16 * 128 * 2  # bytes of a layer and token


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B))
    return read_shape(tmp_path / "config.json")


@pytest.mark.parametrize("tokens", [1000, 1300, 100_000])
def test_windows_do_not_grow_with_the_sequence(shape, tokens):
    windows = 52 * EACH * min(1024 + WINDOW_SLACK, tokens)  # the rings, whatever is in them
    one, two = (parts_on_cpu(shape, tokens, Speculation("ar"), sequences=count)["KV cache"] for count in (1, 2))
    assert one == 10 * EACH * tokens + windows >= shape.kv_bytes(tokens, 2)
    assert two == 2 * one
    for method in ("retrieval", "auto"):  # the selected cache has them once more
        drafting = parts_on_cpu(shape, tokens, Speculation(method, budget=64))
        assert drafting["retrieval cache"] > windows


@pytest.mark.parametrize("tokens", [100, 700])
def test_rings_are_allocated_as_planned(tmp_path, tokens):
    kinds = ["sliding_attention", "full_attention"]
    make_hf_model("olmo3", sliding_window=40, layer_types=kinds).save_pretrained(tmp_path)
    model = load_model(FolderCheckpoint(tmp_path), torch.float32, torch.device("cpu"), lambda done, total: None)
    assert model.new_cache(tokens).windows.nbytes == read_shape(tmp_path / "config.json").ring_bytes(tokens, 4)


def test_a_plan_offloads_layers_without_a_window_alone(shape):
    plan = make_plan(replace(request(), shape=shape))
    assert plan.offload != "none" and 0 <= plan.placed.resident_layers < 10
    host = plan.host.parts["KV cache"]
    assert abs(host - (10 - plan.placed.resident_layers) * EACH * 131072) < 0.02 * host
