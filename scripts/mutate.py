#!/usr/bin/env python
"""Plant each mutation of scripts/mutations.yaml in a copy of the repository, and see whether its test fails.

scripts/mutate.py                 # all of them
scripts/mutate.py sampling noise  # those whose file or reason contains one of these words
scripts/mutate.py --list          # only whether each still applies

A row is `caught` if its test fails, `escaped` if it passes, and `stale` if the old text is not found exactly once or
the test cannot be run. Exits with 1 unless all are caught. The checkout is never written to.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "mutations.yaml"
TIMEOUT = 600  # seconds of a row's test, which a mutation may also make hang, or of building the C sources
_LEFT_OUT = (".git", ".venv", "build", "dist", "*.egg-info", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_C_SOURCES = (".c", ".h")
_FAILED, _NOT_RUN = 1, "stale: its test could not be run"  # pytest's exit code; others are of usage or of no test


@dataclass(frozen=True)
class Mutation:
    """A plausible defect: `old` becomes `new` in `file`, and `test` must fail."""

    file: str
    old: str
    new: str
    reason: str
    test: str

    def apply(self, root: Path) -> str | None:
        """Return the file's text with the mutation, or None if `old` is not there exactly once."""
        path = root / self.file
        text = path.read_text("utf-8") if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 and self.old != self.new else None

    def is_named(self, words: Sequence[str]) -> bool:
        """Return whether the file or the reason contains one of `words`, or there are none."""
        return not words or any(word in f"{self.file} {self.reason}" for word in words)


def read_mutations(path: Path = TABLE) -> list[Mutation]:
    """Return the rows of the table."""
    return [Mutation(**row) for row in yaml.safe_load(path.read_text("utf-8"))]


def stale(mutations: Sequence[Mutation], root: Path = ROOT) -> list[str]:
    """Return a line for each mutation that no longer applies, or whose test's function is gone."""
    lines = []
    for each in mutations:
        file, _, name = each.test.partition("::")
        function = f"def {name.partition('[')[0].rpartition('::')[2]}("
        if each.apply(root) is None:
            lines.append(f"{each.file}: the old text is not there exactly once: {each.reason}")
        elif not (root / file).is_file() or function not in (root / file).read_text("utf-8"):
            lines.append(f"{each.test}: there is no such test: {each.reason}")
    return lines


class Copy:
    """A copy of the repository, in which one mutation at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        self._planted = 0

    def judge(self, mutation: Mutation) -> str:
        """Return `caught`, `escaped` or `stale`, with details."""
        text = mutation.apply(self.root)
        if text is None:
            return "stale: the old text is not there exactly once"
        path = self.root / mutation.file
        changed = [path, *(path.parent.glob("_kernel*") if path.suffix in _C_SOURCES else ())]
        before = {each: each.read_bytes() for each in changed}
        try:
            self._write(path, text.encode())
            if path.suffix in _C_SOURCES and self.run("setup.py", "build_ext", "--inplace", "--force") != 0:
                return "stale: it does not compile"
            return self._verdict(mutation.test)
        finally:
            for each, content in before.items():
                self._write(each, content)

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file, so that the cached bytecode of an earlier one is not run."""
        self._planted += 1
        path.write_bytes(content)
        os.utime(path, (self._planted, self._planted))  # bytecode is known by seconds and size

    def _verdict(self, test: str) -> str:
        try:
            code = self.pytest(test)
        except subprocess.TimeoutExpired:
            return f"caught: not done in {TIMEOUT} s"
        return "escaped" if code == 0 else "caught" if code == _FAILED else _NOT_RUN

    def pytest(self, *tests: str, timeout: float | None = TIMEOUT) -> int:
        """Run tests in the copy; return the exit code."""
        return self.run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests, timeout=timeout)

    def run(self, *arguments: str, timeout: float | None = TIMEOUT) -> int:
        """Run Python in the copy, with its packages instead of the installed ones; return the exit code."""
        env = {**os.environ, "PYTHONPATH": str(self.root)}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, timeout=timeout).returncode


def main(arguments: Sequence[str]) -> int:
    """Judge the mutations that are named; return the exit code."""
    parser = argparse.ArgumentParser(description="Plant mutations and run the tests that must fail.")
    parser.add_argument("words", nargs="*", help="only mutations whose file or reason contains one of them")
    parser.add_argument("--list", action="store_true", help="only say which are stale")
    chosen = parser.parse_args(arguments)
    mutations = [each for each in read_mutations() if each.is_named(chosen.words)]
    if chosen.list:
        lines = stale(mutations)
        print(*lines, f"{len(mutations)} mutations, {len(lines)} stale", sep="\n")
        return int(bool(lines))
    with tempfile.TemporaryDirectory() as folder:
        return _judge_all(Copy(Path(folder)), mutations)


def _judge_all(copy: Copy, mutations: Sequence[Mutation]) -> int:
    tests = sorted({each.test for each in mutations})
    if copy.pytest(*tests, timeout=None) != 0:  # all of them, long ones too: more than one may take
        print("the tests do not pass without a mutation")
        return 1
    not_caught = 0
    for each in mutations:
        verdict = copy.judge(each)
        not_caught += not verdict.startswith("caught")
        print(f"{verdict}: {each.file}: {each.reason}", flush=True)
    print(f"{len(mutations)} mutations, {len(mutations) - not_caught} caught")
    return int(bool(not_caught))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
