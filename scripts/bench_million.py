"""Measure everything that grows with the prompt at 128K, 512K and 1M tokens: time, memory, and the ratio to linear.

    python scripts/bench_million.py
    python scripts/bench_million.py --lengths 128K 1M --layers 8 --parts retrieval sequence

The model has the embedded one's shape with fewer layers and random weights, and its keys and values are restored, not
computed: they are random too. Times and sizes are those of the layers that there are, unless a column says otherwise.
"of linear" is the cost of a token relative to that at the first length: 1.0 is linear. The share of a verification is
that of a pass of 8 rows over the full cache with as many layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from million_parts import LAYERS, PARTS, Subject, make_subject

from offload.units import parse_tokens


@dataclass(frozen=True)
class Row:
    """What one part costs at one length."""

    part: str
    tokens: int
    seconds: float
    size: int | None


def measure(subject: Subject, names: list[str]) -> Iterator[Row]:
    """Yield the cost of each part for a subject."""
    for name in names:
        for part, seconds, size in PARTS[name](subject):
            yield Row(part, subject.tokens, seconds, size)


def shown(rows: list[Row], first: int) -> Iterator[str]:
    """Yield a line for each part and length."""
    base = {row.part: row for row in rows if row.tokens == first}
    verification = {row.tokens: row.seconds for row in rows if row.part == "verification of 8"}
    for part in base:
        for row in (each for each in rows if each.part == part):
            growth = row.tokens / first
            ratio = row.seconds / base[part].seconds / growth if base[part].seconds else float("nan")
            size = "-" if row.size is None else f"{row.size / 1e6:,.1f}"
            share = f"{row.seconds / verification[row.tokens]:8.1%}" if row.tokens in verification else "       -"
            yield f"{part:34} {row.tokens:>9,} {1e3 * row.seconds:>11,.2f} {ratio:>9.2f} {size:>10} {share}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=parse_tokens, nargs="+", default=[2**17, 2**19, 2**20])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in args.lengths:
            subject = make_subject(Path(folder) / str(tokens), tokens, args.layers)
            rows += measure(subject, args.parts)
            subject.close()
            print(f"measured {tokens:,} tokens, {psutil.Process().memory_info().rss / 1e9:.1f} GB in use", flush=True)
    print(f"\n{args.layers} layers, {torch.get_num_threads()} threads")
    print(f"{'part':34} {'tokens':>9} {'ms':>11} {'of linear':>9} {'MB':>10} {'of a verification':>8}")
    for line in shown(rows, args.lengths[0]):
        print(line)


if __name__ == "__main__":
    main()
