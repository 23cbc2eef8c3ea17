"""Predicted times of token trees, against Sequoia's table 2 and against chains."""

from dataclasses import replace

import pytest

from offload.architecture.known_models import KNOWN
from offload.planning.inputs import PlanInputs
from offload.planning.latency import predict
from offload.planning.passes import Passes
from offload.planning.placement import place
from offload.settings.config import Placement, Speculation
from offload.speculation.trees.best_size import fastest_tree
from offload.speculation.trees.drafted_trees import ChildAcceptance
from scripts.papers import TABLES
from tests.support.planning import HARDWARE
from tests.support.published_trees import LARGER_ON_DEVICE, OFFLOADED, ON_DEVICE, first_acceptance

L40 = replace(HARDWARE["l40s"], flops=181e12)  # the L40S's memory and link; dense BF16 from NVIDIA's data sheet
FIVE_BY_EIGHT, EIGHT_BY_EIGHT = (f"k-ary:{first}{'x1' * 7}" for first in (5, 8))  # SpecInfer's trees
PLAIN_S = 5.7  # per token, with DeepSpeed-ZeRO-Inference: it gives the link's rate
MODELS = {
    "Llama-2-70B": (KNOWN["Llama-2-70B"], KNOWN["Llama-2-7B-128K"]),
    "Llama-3-70B": (KNOWN["Llama-3.1-70B"], KNOWN["Llama-3.1-8B"]),
}


def passes(model, tree="chain", acceptance=None, method="naive", hardware=L40):
    """Return passes on an L40 with all weights of the target in host memory, as DeepSpeed's baseline has them."""
    target, draft = MODELS[model]
    settings = Speculation(method, "a model", tree=tree)
    request = PlanInputs(model, target, 512, hardware, Placement(), settings, draft=draft, draft_acceptance=acceptance)
    return Passes(request, replace(place(request), weight_layers=0))


def decoding(model, tree, acceptance, method="naive"):
    return predict(passes(model, tree, acceptance, method), method)


@pytest.mark.parametrize("row", OFFLOADED)
def test_streamed_weights_with_sequoias_tree_take_the_published_time(row):
    nominal_s = decoding(row.model, "chain", None, "ar").tbt.seconds
    assert nominal_s == pytest.approx(PLAIN_S, rel=0.05)
    timed = passes(row.model, hardware=replace(L40, link=L40.link * nominal_s / PLAIN_S))
    rates = ChildAcceptance(first_acceptance(row)).rates(0)
    times = timed.draft_step, lambda rows: timed.full(rows)[0].seconds
    tree = fastest_tree(rates, *times, row.nodes - 1, row.depth - 1, sizes=(), may_pause=False)
    assert len(tree.parents) == row.nodes - 1
    assert tree.tokens == pytest.approx(row.tokens, rel=0.2)
    assert tree.token_s == pytest.approx(row.seconds, rel=0.2)


def test_papers_are_planned_with_the_acceptance_behind_the_published_tables():
    """Those of tables 1 to 3, rounded to half a percent; the project page's rows have that of the nearest model."""
    cases = [row.setup for name, rows in TABLES.items() if name.startswith("sequoia") for row in rows()]
    names = {"": "Llama-2-7B", "Llama-3-70B": "Llama-3.1-70B"}
    rows = ON_DEVICE + LARGER_ON_DEVICE + OFFLOADED
    published = {(names.get(row.model, row.model), row.nodes - 1, round(first_acceptance(row), 3)) for row in rows}
    sized = [case for case in cases if case.method == "naive" and case.tree.isdigit()]
    assert published == {(case.model, int(case.tree), case.draft_acceptance) for case in sized if case.gpu[0] != "r"}
    assert {case.draft_acceptance for case in sized if case.gpu[0] == "r"} == {0.855, 0.705}
    assert {case.tree for case in cases if case.method == "naive" and case not in sized} == {
        FIVE_BY_EIGHT,
        EIGHT_BY_EIGHT,
    }


def test_automatic_trees_are_at_least_as_fast_as_every_other_shape():
    auto, *others = (decoding("Llama-3-70B", shape, 0.6) for shape in ("auto", "chain", "64", "512", "k-ary:4x2x1x1"))
    assert all(auto.tbt.seconds <= 1.01 * other.tbt.seconds for other in others)
    assert auto.tbt.seconds < 0.77 * others[0].tbt.seconds  # 1.3 of the best chain
    assert others[0].depth == 0 and others[3].gamma2 == 28 and others[3].depth == 4
