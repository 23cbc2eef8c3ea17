"""The bytes of a plan's parts: what a search over numbers of layers computes once is what each number has."""

from dataclasses import replace

import pytest

from offload.planning.request import PlanRequest
from offload.planning.tier_bytes import TierBytes, _estimate
from offload.settings.config import Placement
from tests.support.planning import request

REQUESTS = {
    "mean keys over a link": request(method="retrieval"),
    "draft model": request("Llama-2-7B-128K", "2x-rtx-4090", method="triforce", draft="lookup", tree="6"),
    "quantised": replace(request(method="retrieval"), kv="q8", sequences=3),
    "a CPU's link": request("Llama-3.2-1B", "cpu", placement=Placement(offload="stream", link_gb_s=1)),
    "windows": request("Gemma-3-27B", "a100", method="ar"),
    "planes": replace(request(placement=Placement(offload="planes"), method="retrieval"), kv="packed"),
}


@pytest.mark.parametrize("wanted", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("order", ["layers", "chunks"])
def test_the_estimate_of_any_number_of_layers_is_that_of_this_number(wanted: PlanRequest, order):
    sizes, layers = TierBytes(wanted, order), wanted.shape.kv_layers
    found = [sizes._need(kv) for kv in range(layers + 1)]
    assert found == [_estimate(wanted, layers - kv, order == "layers") for kv in range(layers + 1)]
    assert wanted is not REQUESTS["mean keys over a link"] or len({need.retrieval for need in found}) == layers + 1
