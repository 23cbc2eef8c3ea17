"""Draw the pictures of the documentation into docs/images, as SVG. The same sources give the same bytes.

    python scripts/pictures.py
    python scripts/pictures.py --output /tmp/pictures context experiment-budget

Charts are drawn from docs/benchmarks/*.json (triforce bench --json, bench_acceptance.py, quick_experiments.sh) and
from plans of known models on the shipped profiles; diagrams from this code and the import contracts in pyproject.toml.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from charts import acceptance, context, published
from diagrams import hierarchy, packages, tiers
from experiment_charts import PICTURES as EXPERIMENTS

PICTURES = {draw.__name__: draw for draw in (hierarchy, tiers, packages, context, acceptance, published)}
PICTURES |= EXPERIMENTS


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PICTURES)}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "images", metavar="FOLDER")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PICTURES):
        parser.error(f"no picture named {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names or PICTURES:
        (args.output / f"{name}.svg").write_text(PICTURES[name]().svg(), "utf-8")


if __name__ == "__main__":
    main()
