"""Prompts of models with linear attention on disk: restored up to a block with states, with the same answers."""

import pytest

from offload import GenerationConfig, Sampling
from offload.errors import Degraded
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.prompt_cache import writer
from tests.support.models import FAMILY_CASES, ids, make_hf_model
from tests.support.offloading import native_kernel
from tests.support.prompt_cache import engine_on, said, spoil

PROMPT = ids(900)  # 7 whole blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3.5")
    family, changes = FAMILY_CASES["qwen3.5"]
    make_hf_model(family, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True] if native_kernel() else [False])
def new_engine(request, folder):
    """Returns a new engine with a prompt cache in a folder, or without."""
    return lambda home, **more: engine_on(
        folder, home, operations=NativeOperations(native_kernel()) if request.param else TorchOperations(), **more
    )


@pytest.fixture
def plain(new_engine):
    return lambda prompt: said(new_engine(None), prompt)[0]


def with_states(home):
    """The numbers of the blocks with states."""
    return sorted(int(path.name[:6]) for path in home.glob("*/*-states.safetensors"))


def test_a_prompt_is_restored_up_to_its_last_block(new_engine, plain, tmp_path):
    expected = plain(PROMPT)
    assert said(new_engine(tmp_path), PROMPT) == (expected, 0)
    assert with_states(tmp_path) == [6]
    assert said(new_engine(tmp_path), PROMPT) == (expected, 896)
    assert said(new_engine(tmp_path), PROMPT, "retrieval") == (expected, 896)


def test_a_common_beginning_is_restored_where_states_were_saved(new_engine, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EVERY", 2)
    said(new_engine(tmp_path), PROMPT)
    assert with_states(tmp_path) == [1, 3, 5, 6]
    other = PROMPT[:700] + ids(100, 7)
    assert said(new_engine(tmp_path), other) == (plain(other), 512)
    short = PROMPT[:400]
    assert said(new_engine(tmp_path), short) == (plain(short), 256)
    assert with_states(tmp_path).count(2) == 1  # the short prompt's last block
    assert said(new_engine(tmp_path), short)[1] == 384


def test_a_conversation_goes_on_in_memory_and_is_saved(new_engine, plain, tmp_path):
    engine = new_engine(tmp_path, room=2000)
    answer, _ = said(engine, PROMPT)
    longer = PROMPT + answer + ids(300, 9)
    expected = plain(longer)
    assert said(engine, longer) == (expected, 0)
    found, restored = said(new_engine(tmp_path), longer)
    assert found == expected and restored >= 896
    assert said(engine, PROMPT[:600] + ids(400, 5))[1] == 0  # no states there


def test_damaged_states_are_not_used_and_saved_again(new_engine, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EVERY", 4)
    expected, _ = said(new_engine(tmp_path), PROMPT)
    (path,) = tmp_path.glob("*/000006-*-states.safetensors")
    spoil(path)
    with pytest.warns(Degraded, match="states.safetensors: its checksum is wrong"):
        assert said(new_engine(tmp_path), PROMPT) == (expected, 512)
    assert said(new_engine(tmp_path), PROMPT) == (expected, 896)


def test_a_restoration_that_was_given_up_leaves_nothing_wrong(new_engine, plain, tmp_path):
    said(new_engine(tmp_path), PROMPT)
    engine = new_engine(tmp_path, room=2000)
    events = engine.generate(PROMPT, Sampling(temperature=0), GenerationConfig(max_new_tokens=4))
    while not getattr(next(events), "restored", False):
        pass
    events.close()
    engine.sessions.prompts = None
    assert said(engine, PROMPT)[0] == plain(PROMPT)
