"""Plan drafts from plane A where it is on a GPU and plane B on its host, beside what else drafts. Nothing runs.

    python scripts/plan_planes.py --gpu rtx-4090 --model Llama-3.1-8B --quantize q8 --context 128K

No store lies so today: keys and values over tiers are not packed. Of packed ones, so many bytes as the device has room
for stay there, whichever way they are divided. By planes, all tokens can be drafted from if there is room for plane A;
a verification streams the rest. Other middle levels are planned with the same bytes, in layers; the host may attend to
theirs. Methods draft by the middle level alone, and `--acceptance` is of each: measured on a small model
(docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from offload.architecture.kv_formats import format_bytes
from offload.architecture.weight_formats import rounded_bits
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.loading.hub.download import dimensions
from offload.planning.latency import Decoding, predict
from offload.planning.passes import Passes
from offload.planning.placement import Placed, device_limit, place
from offload.planning.request import PlanRequest
from offload.planning.tier_bytes import TierBytes
from offload.settings.config import Placement, Speculation
from offload.units import GIB, parse_tokens

MIDDLES = ("retrieval", "q4", "plane")


def request_of(options: argparse.Namespace, middle: str, acceptance: float) -> PlanRequest:
    """Return the request that is planned: packed keys and values, and a middle level that drafts alone."""
    shape = dimensions(options.model)
    return PlanRequest(
        model=options.model,
        shape=shape,
        tokens=options.context,
        hardware=describe(profiles.load(options.gpu)),
        placement=Placement(offload="stream") if middle == "plane" else Placement(),
        speculation=Speculation("retrieval", middle=middle),
        acceptance=acceptance,
        weight_bits=None if options.quantize is None else rounded_bits(shape, options.quantize),
        kv="packed",
    )


def placed_in(request: PlanRequest) -> Placed | None:
    """Return a placement with all weights and as many packed bytes as fit on the device; None if there is no room.

    It is one in layers, which streams as many bytes as one in planes; that has to have room for plane A.
    """
    shape, limit = request.shape, device_limit(request)
    assert limit is not None, "the device's memory is known"
    is_plane = request.speculation.middle == "plane"
    counted = replace(request, speculation=Speculation("ar")) if is_plane else request  # which has no memory of its own
    parts = TierBytes(counted, "chunks").on_device(shape.layers, 0)
    each, plane = (format_bytes(shape.growing, kind, request.tokens, request.itemsize) for kind in ("packed", "plane"))
    room = limit - sum(parts.values())
    if room < plane * shape.kv_layers * is_plane:
        return None
    resident = min(int(room / each), shape.kv_layers)
    return replace(place(counted), resident_layers=resident, weight_layers=shape.layers, prefill_order="chunks")


def row(name: str, placed: Placed, decoding: Decoding, request: PlanRequest) -> str:
    """Return a line: the bytes on the host, the tokens of a verification, and the time of a token."""
    away = request.shape.kv_layers - placed.resident_layers
    size = away * format_bytes(request.shape.growing, "packed", request.tokens, request.itemsize) / GIB
    drafted = f"{decoding.gamma2:3} drafted, {decoding.tokens_per_verification:4.1f} a verification"
    time = f"{1e3 * decoding.tbt.seconds:6.1f} ms a token, {1 / decoding.tbt.seconds:6.1f} tokens/s"
    return f"{name:10} {size:5.1f} GiB on the host  {drafted if decoding.gamma2 else '':32} {time}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--context", type=parse_tokens, default=131072)
    parser.add_argument("--quantize")
    parser.add_argument("--acceptance", default="0.9,0.96,0.97", help=f"of {', '.join(MIDDLES)}")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rates = dict(zip(MIDDLES, map(float, options.acceptance.split(",")), strict=True))
    print(f"planned: {options.model}, {options.context:,} tokens, {options.quantize or 'bf16'} on {options.gpu}")
    for middle, rate in rates.items():
        request = request_of(options, middle, rate)
        if (placed := placed_in(request)) is None:
            print(f"{middle:10} does not fit")
            continue
        passes = Passes(request, placed)
        if middle == "retrieval":
            print(row("ar", placed, predict(passes, "ar"), request))
        print(row(middle, placed, predict(passes, "retrieval"), request))


if __name__ == "__main__":
    main()
