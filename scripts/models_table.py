"""Prints the table of docs/models.md: models for a book on several kinds of hardware, as `triforce profile` plans them.

    python scripts/models_table.py

The CPU is a desktop with 8 cores and two channels of DDR4-3200, the rates that plans assume without a measurement.
"""

from offload.architecture.known_models import KNOWN
from offload.architecture.weight_formats import rounded_bits
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.loading.hub.registry import HUB_MODELS
from offload.planning.plan import make_plan
from offload.planning.request import PlanRequest
from offload.settings.config import EngineConfig
from offload.units import GIB

CONTEXT = 128 * 1024  # tokens, prompt and answer
CPU_CONTEXT = 32 * 1024
CHOICES = (  # (memory, profile, models, maybe with the option --quantize, tokens)
    ("CPU, 16 GB", "cpu", ("Llama-3.2-1B", "Qwen3-0.6B"), CPU_CONTEXT),
    ("12 GB", "rtx-3060", ("Llama-3.2-1B", "Qwen3-4B-2507", "Qwen3-4B-2507 --quantize q4"), CONTEXT),
    ("16 GB", "rtx-5080", ("Llama-3.2-3B", "Qwen3-4B-2507"), CONTEXT),
    ("24 GB", "rtx-4090", ("Qwen2.5-7B-1M", "Llama-3.1-8B", "Llama-3.1-8B --quantize q4"), CONTEXT),
    ("48 GB", "a6000", ("Llama-3.1-8B", "Mistral-Nemo"), CONTEXT),
    ("80 GB", "h100", ("Qwen2.5-14B-1M", "Llama-3.1-70B", "Llama-3.1-70B --quantize q4"), CONTEXT),
)
COLUMNS = ("hardware", "profile", "`--model`", "licence", "tokens", "on the device", "on the host", "first token")
COLUMNS += ("ms a token, `ar`", "ms a token, `auto`")


def rows() -> list[str]:
    """Return the table's lines, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for memory, profile, models, tokens in CHOICES:
        for model in models:
            lines.append(row(memory, profile, model, tokens))
    return lines


def row(memory: str, profile: str, asked: str, tokens: int) -> str:
    """Return the line of one model on one profile, as `triforce profile` plans it."""
    model, _, level = asked.partition(" --quantize ")
    shape, options = (
        KNOWN[model],
        {"weight_bits": rounded_bits(KNOWN[model], level), "quantize": level} if level else {},
    )
    sheet = profiles.load(profile)
    hardware = describe(sheet, host_memory=16 * GIB, cores=8) if profile == "cpu" else describe(sheet)
    chunk = sheet.options.get("prefill_chunk", EngineConfig().prefill_chunk)
    request = PlanRequest(model, shape, tokens, hardware, prefill_chunk=chunk, kv="auto", packs=True, **options)
    plan = make_plan(request)
    if not plan.fits:
        raise SystemExit(f"{model} does not fit {profile}: {plan.shortage()}")
    licence = HUB_MODELS[model].note.partition(";")[0].removesuffix(" Community License")
    times = [plan.plain.tbt.seconds, plan.chosen.tbt.seconds]
    cells = [memory, profile, asked, licence, f"{tokens // 1024}K"]
    cells += [f"{tier.total / GIB:.0f} GiB" for tier in (plan.device, plan.host)]
    cells += [f"{plan.ttft.seconds:.0f} s", *(f"{1000 * seconds:.0f}" for seconds in times)]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(rows()))
