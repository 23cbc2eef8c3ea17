"""config.json read without transformers, against AutoConfig."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload.architecture.families import FAMILIES
from offload.architecture.hf_config import shape_from_config
from offload.architecture.rope import Rope
from offload.errors import CheckpointError, UnsupportedModel

HEADS = 4
WINDOWED = ("mistral", "ministral", "ministral3", "phi3", "starcoder2")
EPSILONS = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps")
FACTORS = [1.0 + index / 8 for index in range(8)]
SCALED = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 16, "mscale": 0.7},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 256},
    {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 2},
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "factor": 2.0},
    {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "original_max_position_embeddings": 512},
]
OPTIONAL = {
    "hidden_size": st.sampled_from([64, 128]),
    "num_key_value_heads": st.sampled_from([1, 2, 4, None]),
    "head_dim": st.sampled_from([16, 32, None]),
    "intermediate_size": st.integers(1, 500),
    "num_hidden_layers": st.integers(1, 40),
    "vocab_size": st.integers(3, 500),
    "max_position_embeddings": st.integers(16, 5000),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "sliding_window": st.sampled_from([None, 256]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.sampled_from([0, 2, 40]),
    "eos_token_id": st.sampled_from([None, 1, [0, 2]]),
    "hidden_act": st.sampled_from(["silu", "gelu"]),
    "rope_theta": st.sampled_from([10000.0, 500000, 1e6]),
    "original_max_position_embeddings": st.just(1024),
    "torch_dtype": st.just("bfloat16"),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 267, "max_position_embeddings": 512}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": HEADS}
CONFIGS = st.fixed_dictionaries(
    {"model_type": st.sampled_from(["llama", "mistral", "qwen2", "qwen3"])}, optional=OPTIONAL
).map(lambda changes: SIZES | {"num_key_value_heads": 2} | changes)
ROPES = st.one_of(
    st.just({}),
    st.sampled_from([None, *SCALED]).map(lambda rope: {"rope_scaling": rope}),
    st.sampled_from(SCALED).map(lambda rope: {"rope_parameters": rope | {"rope_theta": 20000.0}}),
)


def by_transformers(values, folder):
    """AutoConfig's config of the values, or None where it refuses them."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception:  # its validators raise many types
        return None


def comparable(config):
    """What a shape has of transformers' config, by the shape's names."""
    family = config.model_type
    has_window = family in WINDOWED or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    own = config.per_layer_config["full_attention"] if family == "gemma4_text" else config
    head_dim, rank = getattr(own, "head_dim", None), getattr(config, "kv_lora_rank", 0)
    eos, rope = config.eos_token_id, config.rope_parameters
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": 1 if rank else own.num_key_value_heads,
        "head_dim": rank + config.qk_rope_head_dim
        if rank
        else head_dim or config.hidden_size // config.num_attention_heads,
        "intermediate": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        "vocab": config.vocab_size,
        "norm_eps": next(getattr(config, name) for name in EPSILONS if hasattr(config, name)),
        "tied_embeddings": config.tie_word_embeddings,
        "sliding_window": getattr(config, "sliding_window", None) if has_window else None,
        "max_positions": config.max_position_embeddings,
        "rope": dict(rope.get("full_attention", rope)),
        "sliding_rope": rope.get("sliding_attention"),
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }


def test_configs_are_read_as_by_transformers(tmp_path):
    compared = 0

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(CONFIGS, ROPES)
    def check(config, rope):
        nonlocal compared
        values = config | rope
        theirs = by_transformers(values, tmp_path)
        try:
            ours = shape_from_config(values, {})
        except UnsupportedModel:
            assert values.get("hidden_act") == "gelu"
            return
        except CheckpointError:
            assert theirs is None or theirs.num_attention_heads % theirs.num_key_value_heads
            return
        if theirs is None:
            return  # what only transformers' validators refuse, this decoder computes
        found = comparable(theirs)
        if values["model_type"] == "llama":
            found["sliding_window"] = ours.sliding_window
        assert {name: getattr(ours, name) for name in found} == found
        compared += 1

    check()
    assert compared > 40


MORE = {"num_key_value_heads": 2, "eos_token_id": 2, "head_dim": 16, "num_hidden_layers": 6}
MORE |= {"vocab_size_per_layer_input": 267}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window_pattern": 3, "full_attention_interval": 2},
        {"layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"]},
    ],
)
def test_other_values_and_kinds_of_layers_are_those_of_transformers(family, change, tmp_path):
    if change.get("layer_types") and not FAMILIES[family].has_layer_windows:
        change = {}
    values = {"model_type": family} | SIZES | MORE | change
    if "kv_lora_rank" in FAMILIES[family].defaults:
        del values["head_dim"]  # of the rotated part alone
    theirs, shape = by_transformers(values, tmp_path), shape_from_config(values, {})
    found = comparable(theirs)
    for name in ("type", "max_position_embeddings"):  # Ministral 3 has them in its default, and reads neither
        found["rope"].pop(name, None)
    assert {name: getattr(shape, name) for name in found if name != "sliding_window"} == {
        name: value for name, value in found.items() if name != "sliding_window"
    }
    if FAMILIES[family].has_layer_windows:
        expected = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
        if all(expected):  # up to there, they attend to all tokens
            assert (shape.sliding_window, shape.context) == (theirs.sliding_window, min(theirs.sliding_window, 512))
        else:
            assert [shape.spec(layer).window for layer in range(shape.layers)] == expected
    if FAMILIES[family].has_linear_layers:
        assert [kind for kind, _ in shape.places] == theirs.layer_types


def test_a_model_without_attention_to_all_tokens_is_refused():
    linear = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    with pytest.raises(UnsupportedModel, match="all of whose layers have linear attention"):
        shape_from_config({"model_type": "qwen3_next"} | SIZES | linear, {})
    with pytest.raises(CheckpointError, match="layer_types"):
        shape_from_config(
            {"model_type": "qwen3_next"} | SIZES | linear | {"layer_types": ["sliding_attention"] * 2}, {}
        )
    with pytest.raises(CheckpointError, match="linear_num_key_heads"):
        shape_from_config({"model_type": "qwen3_next", "linear_num_key_heads": 24} | SIZES, {})


def test_a_config_without_its_sizes_is_refused_by_name():
    with pytest.raises(CheckpointError, match="has no vocab_size"):
        shape_from_config({"model_type": "llama"}, {})


def test_generation_config_adds_ends_of_sequence():
    ours = shape_from_config({"model_type": "llama", "eos_token_id": 2} | SIZES, {"eos_token_id": [2, 7]})
    assert ours.eos_ids == (2, 7)


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope.get("rope_type") or rope["type"])
def test_rotations_are_bitwise_those_of_transformers(rope, tmp_path):
    length = 3000
    values = {"model_type": "llama"} | SIZES | {"max_position_embeddings": 1024}
    values |= {"rope_theta": 500000.0, "rope_scaling": rope}
    config = by_transformers(values, tmp_path)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inverse, factor = 1.0 / 500000.0 ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    angles = torch.outer(torch.arange(length).float(), inverse)
    cos, sin = Rope(shape_from_config(values, {}), length, torch.float32, torch.device("cpu")).rows(0, length)
    assert torch.equal(cos[:, 0, :8], angles.cos() * factor)
    assert torch.equal(sin[:, 0, 8:], angles.sin() * factor)


def test_dual_chunk_attention_ends_the_context_where_it_is_no_longer_full_attention():
    config = {"model_type": "qwen2"} | SIZES
    whole = {"chunk_size": 262, "local_size": 8, "original_max_position_embeddings": 300}
    assert shape_from_config(config | {"dual_chunk_attention_config": whole}, {}).context == 262
    for wrong in ({"local_size": 8}, {"chunk_size": 0}, {"chunk_size": "many"}, [1], "yes"):
        with pytest.raises(CheckpointError, match="dual_chunk_attention_config"):
            shape_from_config(config | {"dual_chunk_attention_config": wrong}, {})
