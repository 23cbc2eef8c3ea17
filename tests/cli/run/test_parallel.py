"""How many sequences fit the memory."""

from dataclasses import replace

import pytest

from offload.api.loader import open_model
from offload.errors import OutOfMemory
from offload.settings.config import EngineConfig
from triforce_cli.options.request import Request
from triforce_cli.options.settings import resolve
from triforce_cli.run.opened_request import OpenedRequest
from triforce_cli.run.parallel import MOST, check_parallel, fitting_sequences

TOKENS = 1000


@pytest.fixture
def opened(tiny_model_dir):
    """`opened(bytes)`: a request that may use so many bytes."""
    model = open_model(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float32"))

    def make(memory, **changes):
        settings = resolve({"memory": memory, "model": str(tiny_model_dir)}, {}, None)
        return OpenedRequest(Request(settings, None, "summarize", **changes), model, model.sampling)

    return make


def memory_for(opened, sequences):
    return opened(1).model.estimate(TOKENS, sequences).total


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_as_many_fit_as_have_room_for_their_caches(opened, sequences):
    enough = memory_for(opened, sequences)
    assert fitting_sequences(opened(enough), TOKENS) == sequences
    assert fitting_sequences(opened(enough - 1), TOKENS) == max(sequences - 1, 1)
    assert check_parallel("auto", opened(enough), TOKENS) == sequences
    assert check_parallel("auto", opened(enough, verify=True), TOKENS) == max(sequences - 1, 1)


def test_more_than_fit_are_refused_with_the_numbers(opened):
    three = opened(memory_for(opened, 3))
    assert check_parallel(3, three, TOKENS) == 3
    assert check_parallel(9, three, TOKENS, sequences=2) == 2
    with pytest.raises(OutOfMemory) as error:
        check_parallel(4, three, TOKENS)
    assert "4 sequences of 1,000 tokens" in error.value.message and "--parallel 3" in error.value.hint


def test_auto_is_bounded_by_the_sequences_and_by_what_pays(opened):
    plenty = replace(opened(memory_for(opened, 100)))
    assert check_parallel("auto", plenty, TOKENS) == MOST
    assert check_parallel("auto", plenty, TOKENS, sequences=2) == 2
    assert check_parallel(1, plenty, TOKENS) == 1
