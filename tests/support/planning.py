"""Inputs of plans on the shipped profiles, and memory without them."""

from offload.architecture.known_models import KNOWN
from offload.hardware import profiles
from offload.hardware.rates import describe, unrated
from offload.planning.inputs import PlanInputs
from offload.planning.memory import estimate
from offload.settings.config import Placement, Speculation

HARDWARE = {name: describe(profiles.load(name)) for name in profiles.available()}


def request(model="Llama-3.1-8B", gpu="rtx-4090", tokens=131072, placement=None, **speculation):
    speculation = Speculation(**({"budget": 4096} | speculation))
    return PlanInputs(model, KNOWN[model], tokens, HARDWARE[gpu], placement or Placement(), speculation)


def parts_on_cpu(shape, tokens, speculation, **changes):
    """Return the bytes of the parts of a run in a CPU's memory, whose kernel reads a table of blocks."""
    more = {"prefill_chunk": 512, "lists_chunks": True} | changes
    return estimate(PlanInputs("any", shape, tokens, unrated("cpu"), speculation=speculation, **more)).parts
