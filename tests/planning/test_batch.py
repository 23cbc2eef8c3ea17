"""How many sequences fit into memory together."""

from dataclasses import replace

import pytest

from offload import EngineConfig, open_model
from offload.architecture.known_models import KNOWN
from offload.architecture.kv_formats import BLOCK
from offload.planning.batch import fitting_sequences, kv_room
from offload.planning.memory import estimate
from offload.settings.config import Speculation
from offload.units import GIB
from tests.support.planning import request

LOOKUP = {"method": "lookup"}
DRAFTED = {"method": "triforce", "draft": "JackFram/llama-68m"}


def small(**speculation):
    """SmolLM2 on a CPU with room for many sequences of 2,048 tokens."""
    asked = replace(request("SmolLM2-135M", "cpu", 2048, **speculation), prefill_chunk=512, draft=KNOWN["Llama-68M"])
    return replace(asked, hardware=replace(asked.hardware, memory=4 * GIB, host_memory=4 * GIB))


@pytest.mark.parametrize("speculation", [LOOKUP, DRAFTED])
def test_further_sequences_take_what_is_their_own(speculation):
    """KV, mean keys, lookup index and the draft's cache; not weights, and not a prefill chunk's activations."""
    one, five = (estimate(replace(small(**speculation), sequences=count)).parts for count in (1, 5))
    assert five["weights"] == one["weights"] and five["activations"] < 2 * one["activations"]
    for name in {"KV cache", "retrieval cache", "lookup index"} & set(one):
        assert five[name] == 5 * one[name]
    assert "draft" not in speculation or one["draft model"] < five["draft model"] < 5 * one["draft model"]


def test_as_many_sequences_fit_as_memory_has_room_for():
    inputs = small(method="ar")
    one, eight = (estimate(replace(inputs, sequences=count)).total for count in (1, 8))
    assert [fitting_sequences(inputs, size) for size in (one - 1, one, eight - 1, eight)] == [0, 1, 7, 8]


@pytest.mark.parametrize(("count", "spare"), [(1, 0), (3, 0), (3, 1)])
def test_keys_and_values_may_take_what_all_else_leaves(count, spare):
    inputs = small(**DRAFTED)
    kv, together = estimate(inputs).parts["KV cache"], estimate(replace(inputs, sequences=count + spare)).total
    page = BLOCK * kv // inputs.tokens
    assert kv_room(inputs, together + 2 * page, count, spare) == 2 * page + count * kv
    assert kv_room(inputs, 0, count, spare) == kv + page  # one must fit


def test_a_shared_beginning_is_in_memory_once():
    inputs = small(method="ar")
    one, nine = estimate(inputs), estimate(replace(inputs, sequences=9, shared=2000))
    kv = one.parts["KV cache"]
    assert nine.parts["KV cache"] == pytest.approx(kv * (2000 + 9 * 48) / 2048, rel=1e-3)
    assert fitting_sequences(replace(inputs, shared=2000), one.total + kv) > 10
    assert fitting_sequences(replace(inputs, shared=2048), one.total) == 1  # RoPE tables are each sequence's


def test_an_opened_model_says_how_many_sequences_fit(tiny_model_dir):
    opened = open_model(EngineConfig(str(tiny_model_dir), "cpu"), speculation=Speculation(method="ar"))
    one, three = (opened.estimate(64, count).total for count in (1, 3))
    assert [opened.fitting_sequences(64, size) for size in (one - 1, three)] == [0, 3]
    assert opened.fitting_sequences(64, three, shared=60) > 3
