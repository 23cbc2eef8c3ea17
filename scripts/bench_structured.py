"""What a JSON schema of 20 fields costs, and what it saves: runs with and without it, taken in turns, as ratios.

    python scripts/bench_structured.py book.txt --tokens 7600 --new 200 --repeats 3

Prints for each method the time of a verification relative to unconstrained decoding, masks and their time, and tokens a
second; `decoded` runs the tokens that the schema dictates, too. For masks over 150,000 tokens see docs/structured.md.
--processor-time, with OMP_NUM_THREADS=1, is for a machine with other work: times are those of this process alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from offload import LLM, GenerationConfig, Sampling, Speculation
from offload.metrics import Meter
from offload.settings.constraint import Constraint
from offload.speculation.passes.steps import AtOnce
from offload.speculation.sampling.warp import Sampler

KINDS = ({"type": "string", "maxLength": 40}, {"type": "integer"}, {"enum": ["high", "medium", "low"]})
FIELDS = {f"field_{number}": KINDS[number % 3] for number in range(20)}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS)}


def main() -> None:
    """Measure each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7600, help="of the prompt")
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default="ar,lookup,auto")
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    if args.processor_time:
        time.perf_counter = time.process_time
        AtOnce.clock = staticmethod(time.process_time)
    llm = LLM(args.model)
    ids = llm.tokenizer.encode(args.text.read_text("utf-8"))[: args.tokens]
    plain = Sampling(temperature=0.6, coupled=True)
    bound = replace(plain, constraint=Constraint("json-schema", json.dumps(SCHEMA)))
    forced = Sampler.forced

    def run(sampling: Sampling, method: str, seed: int, jumps: bool = True) -> Meter:
        Sampler.forced = forced if jumps else lambda self, limit: []  # type: ignore[method-assign]
        meter = Meter(len(ids), time.perf_counter)
        for event in llm.engine.generate(ids, sampling, GenerationConfig(args.new, seed), Speculation(method)):
            meter.observe(event)
        Sampler.forced = forced  # type: ignore[method-assign]
        return meter

    run(plain, "ar", 0)
    for method in args.methods.split(","):
        rows: dict[str, list[Meter]] = {"unconstrained": [], "decoded": [], "constrained": []}
        for seed in range(args.repeats):
            rows["unconstrained"].append(run(plain, method, seed))
            rows["decoded"].append(run(bound, method, seed, jumps=False))
            rows["constrained"].append(run(bound, method, seed))
        report(method, rows)


def report(method: str, rows: dict[str, list[Meter]]) -> None:
    """Print a method's lines."""
    base = [verification_s(meter) for meter in rows["unconstrained"]]
    for name, meters in rows.items():
        ratios = [verification_s(meter) / other for meter, other in zip(meters, base, strict=True)]
        summary = [meter.summary("length") for meter in meters]
        masks = [each.masks for each in summary if each.masks is not None]
        line = f"{method:10} {name:14} {statistics.median(ratios):5.3f} of a verification"
        line += f"  {statistics.median(each.tokens_per_s or 0 for each in summary):6.1f} tokens/s"
        drafts = [sum(row.drafted for row in meter.levels) / verifications(meter) for meter in meters]
        line += f"  {statistics.median(drafts):4.2f} drafted"
        line += f"  {statistics.median(each.tokens_per_verification or 0 for each in summary):4.2f} tokens/verification"
        if masks:
            each, token = (statistics.median(by.mask_s[name] for by in summary) for name in ("row", "token"))
            share = statistics.median(
                mask["seconds"] / sum(level.draft_s + level.verify_s for level in meter.levels)
                for mask, meter in zip(masks, meters, strict=True)
            )
            line += f"  masks {each * 1e6:.0f} us a row, {token * 1e6:.0f} a token, {share:.2%} of decoding"
            line += f", {masks[0]['forced']} tokens dictated"
        print(line, flush=True)


def verification_s(meter: Meter) -> float:
    """Return the seconds of a verification in the mean."""
    return sum(level.verify_s for level in meter.levels) / verifications(meter)


def verifications(meter: Meter) -> int:
    """Return how many passes there were, at least 1."""
    return max(sum(level.verifications for level in meter.levels), 1)


if __name__ == "__main__":
    main()
