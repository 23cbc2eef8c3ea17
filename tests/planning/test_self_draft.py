"""The plan of a quantised copy that drafts: its level, its memory, what it gains."""

import pytest

from offload.architecture.known_models import KNOWN
from offload.planning.plan import make_plan
from offload.planning.self_draft import best_level, expected_agreements, relative_costs
from offload.planning.suggestions import suggestions
from offload.settings.config import Placement, Speculation
from offload.settings.method_sizes import drafter_kind, has_middle, uses_copy
from offload.units import GIB
from tests.support.planning import request

LLAMA = KNOWN["Llama-3.1-8B"]


def costs(tokens, kv_cost=1.0):
    return relative_costs(LLAMA, LLAMA.parameters * 2, 2, tokens, 1024, kv_cost)


@pytest.mark.parametrize(("changed", "level"), [(0.03, "q4"), (0.1, "q5"), (0.35, "q6"), (0.9, "q8")])
def test_the_fewer_choices_rounding_changes_the_coarser_is_the_level(changed, level):
    assert best_level(expected_agreements(changed), costs(2000)) == level


def test_the_more_kv_the_full_cache_has_the_finer_is_the_level():
    """The copy's step is then a small part of the time, and each rejected token costs a step of the full cache."""
    levels = [best_level(expected_agreements(0.06), costs(tokens, 8.0)) for tokens in (100, 128 * 1024)]
    assert levels == ["q4", "q8"]


def test_costs_are_those_of_the_bytes():
    found = costs(1000)
    assert list(found.values()) == sorted(found.values())
    assert found["q4"] == pytest.approx(5 / 16, rel=0.15)


def test_the_copy_is_planned_and_drafts_faster():
    plain = make_plan(request(gpu="a100", tokens=8192, method="retrieval"))
    plan = make_plan(request(gpu="a100", tokens=8192, method="retrieval", draft="self:q4"))
    assert plan.device.parts["quantised copy"] == pytest.approx(LLAMA.parameters * 5 / 8, rel=0.1)
    assert "quantised copy" not in plain.device.parts
    assert plan.chosen.tbt.seconds < 0.85 * plain.chosen.tbt.seconds  # a GPU reads 4 bits at 0.6 of its bandwidth
    chosen = make_plan(request(gpu="a100", tokens=8192, method="retrieval", draft="self"))
    assert chosen.chosen.tbt.seconds <= 1.02 * plan.chosen.tbt.seconds  # levels are compared by bits alone
    assert chosen.device.parts["quantised copy"] == pytest.approx(LLAMA.parameters * 8.5 / 8, rel=0.1)


def test_a_coarser_copy_is_suggested_where_one_does_not_fit():
    asked = request(tokens=8192, placement=Placement(memory=24 * GIB, offload="none"), draft="self", budget=1024)
    assert not make_plan(asked).fits
    texts = [each.text for each in suggestions(asked)]
    assert "--draft self:q6" in texts, texts  # 16 GB and 7 GB


def test_the_levels_of_each_method():
    assert has_middle(Speculation("auto", "self"), 100)
    assert not has_middle(Speculation("auto"), 100)
    assert [
        uses_copy(Speculation(method, "self:q6")) for method in ("auto", "retrieval", "streaming", "ar", "lookup")
    ] == [True, True, True, False, False]
    assert drafter_kind(Speculation("triforce", "self")) == "lookup"
    assert drafter_kind(Speculation("retrieval", "self")) is None
