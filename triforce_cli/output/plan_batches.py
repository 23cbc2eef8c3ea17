"""What a plan says of batches: as lines of text, and as JSON fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offload.planning.batch import MOST_SEQUENCES, Batches, BatchPlan
from offload.units import counted

from .plan_json import decoding_fields, tier_fields


def batch_lines(batches: Batches) -> Iterator[str]:
    """Yield a line on how many sequences fit together, and one for each size: throughput, and what the batch brings."""
    yield f"batches    {_fitting(batches)}"
    for each in batches.plans:
        yield f"{f'batch {each.sequences}':<10} {_throughput(each) if each.fits else each.together.shortage()}"


def _fitting(batches: Batches) -> str:
    shared = f", with a common beginning of {counted(batches.shared, 'token')}" if batches.shared else ""
    if batches.fitting is None:
        return f"how many sequences fit is not known, as the memory is not{shared}"
    more = " or more" if batches.fitting == MOST_SEQUENCES else ""
    return f"{counted(batches.fitting, 'sequence')}{more} fit{'s' * (batches.fitting == 1)} together{shared}"


def _throughput(batch: BatchPlan) -> str:
    """Return tokens a second of all sequences, plainly and by the method, and relative to one after the other."""
    plain = f"plain {batch.plain_tokens_per_s:,.1f} tokens/s, {batch.plain_gain:.2f}x one after the other"
    method = batch.together.chosen.method
    if method == "ar":
        return plain if batch.alone.chosen.method == "ar" else f"{plain}; speculation does not pay"
    return f"{plain}; {method} {batch.tokens_per_s:,.1f}, {batch.gain:.2f}x; {batch.speedup:.2f}x plain"


def batch_fields(batches: Batches | None) -> dict[str, Any] | None:
    """Return the fields of plans for batches; None without any."""
    if batches is None:
        return None
    sizes = [_size_fields(each) for each in batches.plans]
    return {"fitting_sequences": batches.fitting, "shared_prefix": batches.shared, "sizes": sizes}


def _size_fields(batch: BatchPlan) -> dict[str, Any]:
    plan = batch.together
    return {
        "sequences": batch.sequences,
        "fits": batch.fits,
        "memory": {"device": tier_fields(plan.device), "host": tier_fields(plan.host), "disk": tier_fields(plan.disk)},
        "plain": decoding_fields(plan.plain),
        "chosen": decoding_fields(plan.chosen),
        "plain_tokens_per_s": batch.plain_tokens_per_s,
        "tokens_per_s": batch.tokens_per_s,
        "plain_gain": batch.plain_gain,
        "gain": batch.gain,
        "speedup": batch.speedup,
        "missing": plan.shortage() or None,
    }
