#!/usr/bin/env python3
"""Run commands in terminals of 50, 80 and 120 columns, and draw what they show as SVG pictures in docs/screenshots.

    python scripts/screenshots.py                       all of them, with the embedded model: some minutes
    python scripts/screenshots.py profile cache-list    some of them

Every picture is of a real run: the end of its screen, or, for `prefill`, the screen while the prompt is read. The runs
share a prompt cache of their own, so that `cache list` shows what the others have read. Needs pyte.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from pyte import Screen
from record_terminal import ROOT, draw, record

from offload.system.machine import default_home

WIDTHS = (50, 80, 120)
ROWS = 75
BOOK = "examples/frankenstein-opening.txt"
ASK = ("triforce", "generate", "-f", BOOK, "Who writes these letters?", "-n", "40", "--seed", "1", "--cache")
BENCH = ("--context", "1000", "--new", "32", "--repeats", "2", "--methods", "lookup,retrieval", "--temperature", "0")
COMMANDS = {
    "prefill": (*ASK[:-1], "--no-cache"),
    "generate": ASK,
    "generate-verbose": (*ASK, "-v"),
    "profile": ("triforce", "profile", "--gpu", "4090", "--model", "Llama-2-7B-128K", "--context", "64K"),
    "profile-compare": ("triforce", "profile", "--compare", "--model", "Llama-3.1-8B"),
    "bench": ("triforce", "bench", "-f", BOOK, *BENCH),
    "cache-list": ("triforce", "cache", "list"),
}
PREFILL_SECONDS = (6, 9, 13, 18, 25, 35)  # after its start: on a busy machine loading takes longer


def main() -> None:
    """Record the commands that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *COMMANDS], metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="COLUMNS")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "screenshots", metavar="FOLDER")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "triforce"
        home.mkdir()
        (home / "models").symlink_to(default_home() / "models")  # fetched once
        os.environ["TRIFORCE_HOME"] = str(home)
        for name in args.names or COMMANDS:
            for columns in args.widths:
                screen = _prefill(columns) if name == "prefill" else record(COMMANDS[name], columns, ROWS)
                path = args.output / f"{name}-{columns}.svg"
                path.write_text(draw(screen, COMMANDS[name]), "utf-8")
                print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path, flush=True)


def _prefill(columns: int) -> Screen:
    """Return the screen while the prompt is read, when there is a rate already."""
    for seconds in PREFILL_SECONDS:
        screen = record(COMMANDS["prefill"], columns, ROWS, seconds)
        if any("prefill" in line and " left" in line for line in screen.display):
            return screen
    raise SystemExit("the prefill was not seen: is the machine too fast or too busy?")


if __name__ == "__main__":
    main()
