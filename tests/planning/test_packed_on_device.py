"""Keys and values that fit one GPU only packed: `--kv auto` packs them there, in the plan and in the run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from offload.architecture.known_models import KNOWN
from offload.architecture.weight_formats import rounded_bits
from offload.planning.plan import make_plan
from offload.settings.config import EngineConfig, Placement, Speculation
from tests.support.planning import request
from triforce_cli.run import plan as planning

SHAPE = KNOWN["Llama-3.1-8B"]


def asked_for(**changes):
    """Return 128K tokens of 8 bits a weight on 24 GB, whose keys and values in bf16 are too many."""
    bits = rounded_bits(SHAPE, "q8")
    asked = request("Llama-3.1-8B", "rtx-4090", 131072)
    return replace(asked, **{"kv": "auto", "packs": True, "packs_on_device": True, "weight_bits": bits, **changes})


def test_they_are_packed_where_that_is_faster_than_tiers():
    plan, tiers = make_plan(asked_for()), make_plan(asked_for(packs_on_device=False))
    assert (plan.offload, plan.placed.resident_layers, plan.inputs.kv) == ("none", SHAPE.kv_layers, "packed")
    assert tiers.offload == "hybrid" and tiers.chosen.tbt.seconds > 1.5 * plan.chosen.tbt.seconds
    alone = replace(asked_for().placement, offload="none")
    plan, others = (make_plan(asked_for(placement=alone, packs_on_device=may)) for may in (True, False))
    assert plan.fits and not others.fits


@pytest.mark.parametrize("changes", [{"tokens": 65536}, {"sequences": 2}, {"kv": "bf16"}, {"packs": False}])
def test_else_they_stay_as_they_are(changes):
    asked = replace(asked_for(), **changes)
    plan, without = make_plan(asked), make_plan(replace(asked, packs_on_device=False))
    assert (plan.inputs.kv, plan.placed) == (without.inputs.kv, without.placed)


class Model(SimpleNamespace):
    """What is asked of an opened model."""

    def __replace__(self, **changes):
        return Model(**{**vars(self), **changes})


@pytest.mark.parametrize(
    ("tokens", "can_pack", "ranks", "expected"),
    [(131072, True, 1, "packed"), (65536, True, 1, "auto"), (131072, False, 1, "auto"), (131072, True, 2, "auto")],
)
def test_a_run_has_the_format_of_its_plan(monkeypatch, tokens, can_pack, ranks, expected):
    plan = replace(asked_for(packs=can_pack), tokens=tokens), None
    monkeypatch.setattr(planning, "_inputs_here", lambda *_: plan)
    monkeypatch.setattr(planning, "load_measured", lambda terminal: None)
    monkeypatch.setattr(
        planning,
        "replace",
        lambda each, **new: each.__replace__(**new) if isinstance(each, Model) else replace(each, **new),
    )
    config = EngineConfig(kv="auto")
    group = SimpleNamespace(size=ranks)
    opened = Model(
        model=Model(device=torch.device("cuda"), group=group, config=config),
        settings=Model(engine=config, speculation=Speculation(), placement=Placement()),
        request=Model(),
    )
    found = planning.packed_by_plan(opened, tokens, None)
    assert found.model.config.kv == expected
    assert expected == "auto" or found.request.settings.engine.kv == "packed"
