"""Measure n-gram lookup on a long text: time to build the index, time per proposal, and memory.

python scripts/bench_lookup.py --prompt-file book.txt --tokens 131072
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import psutil

from offload import EngineConfig, open_model
from offload.metrics import percentile
from offload.sequence import TokenSequence
from offload.speculation.drafters.ngram import LookupDrafter

ROOT = Path(__file__).parents[1]
NEW = 2000  # tokens appended one by one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "examples" / "frankenstein.txt")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--model", default=EngineConfig().model)
    options = parser.parse_args()
    tokenizer = open_model(EngineConfig(model=options.model)).tokenizer
    ids = tokenizer.encode(options.prompt_file.read_text("utf-8"), special_tokens=False)[: options.tokens]
    sequence, drafter, before = TokenSequence(ids[:-NEW]), LookupDrafter(), psutil.Process().memory_info().rss
    start = time.perf_counter()
    drafter.draft_kind(sequence)
    built = time.perf_counter() - start
    times = []
    for token in ids[-NEW:]:
        sequence.extend([token])
        sequence.commit()
        start = time.perf_counter()
        drafter.propose(sequence, 16)
        times.append((time.perf_counter() - start) * 1e6)
    size = (psutil.Process().memory_info().rss - before) / 2**20
    median, tail = statistics.median(times), percentile(times, 0.99)
    print(f"{len(ids):,} tokens indexed in {built:.2f} s, {size:.0f} MiB; a token and a proposal: ", end="")
    print(f"median {median:.1f}, p99 {tail:.1f} microseconds")


if __name__ == "__main__":
    main()
