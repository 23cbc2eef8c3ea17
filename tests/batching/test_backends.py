"""Batches where sequences have no pages: torch's operations, and keys and values in tiers."""

import pytest
import torch

from offload.engine import Engine
from offload.memory.factory import TieredStoreFactory
from tests.batching.test_batch import collect, request
from tests.support.engine import tokens
from tests.support.models import ids
from tests.support.offloading import CPU, make_link, make_model, settings

METHODS = [("ar", "lookup"), ("retrieval", "lookup"), ("triforce", "lookup"), ("auto", "lookup")]


def requests():
    return [request(key, method, ids(90 + 40 * key, key), 6) for key, method in enumerate(METHODS)]


def assert_same_alone(engine):
    found = collect(engine.generate_batch(requests(), 3))
    for wanted in requests():
        alone = engine.generate(wanted.ids, wanted.sampling, wanted.config, wanted.speculation)
        assert tokens(found[wanted.key]) == tokens(alone)


@pytest.mark.parametrize(("dtype", "native"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)])
def test_without_tiers(tmp_path, dtype, native):
    assert_same_alone(Engine(make_model(tmp_path, dtype, native), (), 16))


@pytest.mark.parametrize(
    ("tiers", "native"),
    [(settings("stream"), True), (settings("host", 1), False), (settings("hybrid", 1, share=0.5), True)],
)
def test_with_tiers(tmp_path, tiers, native):
    model = make_model(tmp_path, native=native)
    stores = TieredStoreFactory(model.operations, CPU, tiers, make_link())
    assert_same_alone(Engine(model, (), 16, stores=stores))
