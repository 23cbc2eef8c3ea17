"""Packed keys and values over tiers: all tokens and log-probabilities have the bits that they have in bf16."""

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation, Tokens
from offload.engine import Engine
from offload.kernels.native.ops import NativeOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.memory.block_store import BlockStore
from offload.memory.factory import TieredStoreFactory
from tests.support.engine import GREEDY, tokens
from tests.support.models import ids
from tests.support.offloading import CPU, make_link, native_kernel, settings

pytestmark = pytest.mark.xdist_group("native")
PROMPT, NEW = ids(60) * 5, 100  # decoding completes a page


@pytest.fixture(scope="module")
def engine(model_dir):
    """`engine(kv, mode)`: a fresh one on the native kernel in bf16, over tiers of that mode if there is one."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")

    def make(kv, mode=None):
        native = NativeOperations(native_kernel())
        model = load_model(FolderCheckpoint(model_dir), torch.bfloat16, CPU, lambda *_: None, native)
        model.kv = kv
        tiers = mode and TieredStoreFactory(native, CPU, settings(mode, page_tokens=128), make_link(), kv=kv)
        return Engine(model, (), 64, stores=tiers)

    return make


def answer(engine, method="ar", sampling=GREEDY, **more):
    """Return the tokens of a request, and their log-probabilities."""
    config, sizes = GenerationConfig(max_new_tokens=NEW, seed=1), {"budget": 64, "chunk": 16, "sink": 16} | more
    events = list(engine.generate(PROMPT, sampling, config, Speculation(method, **sizes), logprobs=3))
    return tokens(events), [x for event in events if isinstance(event, Tokens) for x in event.logprobs]


def test_in_a_cpu_s_own_memory_they_are_as_they_are(engine):
    assert type(engine("packed").model.new_cache(1).store) is BlockStore


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("hybrid", {}),
        ("stream", {"method": "triforce"}),
        ("stream", {"method": "lookup", "tree": "12"}),
        ("planes", {"method": "retrieval", "middle": "plane"}),
        ("planes", {"method": "triforce", "middle": "plane", "tree": "6"}),
        ("planes", {"method": "retrieval", "sampling": Sampling(temperature=1, coupled=True)}),
    ],
    ids=["host", "levels", "a tree", "planes", "a tree from planes", "a sample from planes"],
)
def test_they_have_the_bits_of_bf16(engine, mode, more):
    """What planes draft with half of the bits stays out of the full cache: a second request goes on from it."""
    own, plain = engine("packed", mode), engine("bf16", mode.replace("planes", "stream"))
    expected = answer(plain, **{name: value for name, value in more.items() if name != "middle"})
    assert answer(own, **more) == expected
    assert answer(own, **more) == expected
