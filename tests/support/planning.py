"""Requests for plans on the shipped profiles."""

from offload.architecture.known_models import KNOWN
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.planning.request import PlanRequest
from offload.settings.config import Placement, Speculation

HARDWARE = {name: describe(profiles.load(name)) for name in profiles.available()}


def request(model="Llama-3.1-8B", gpu="rtx-4090", tokens=131072, placement=None, **speculation):
    return PlanRequest(
        model,
        KNOWN[model],
        tokens,
        HARDWARE[gpu],
        placement or Placement(),
        Speculation(**({"budget": 4096} | speculation)),
    )
