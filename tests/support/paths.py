"""Paths of the repository and the tests' data."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
DATA = ROOT / "tests" / "data"
