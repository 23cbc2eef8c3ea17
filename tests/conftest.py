"""Hooks of every process of a test run; tests/support/fixtures.py has the others.

The process that hands tests out to those that run them imports no torch: they would start seconds later.
"""

import os
import re
from collections import Counter

import pytest


def pytest_configure(config):
    """Leave long tests out, whatever else -m selects, unless it asks for them or a test is named.

    In addopts, `-m "not long"` would be replaced by the -m of the command line.
    """
    chosen, names_a_test = config.option.markexpr, any("::" in argument for argument in config.args)
    if not re.search(r"\blong\b", chosen) and not names_a_test:
        config.option.markexpr = f"({chosen}) and not long" if chosen else "not long"
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.fixtures")


def pytest_sessionstart():
    """Refuse to leave the native kernel's tests out in CI, where it must have been built."""
    if os.environ.get("CI"):
        from tests.support.offloading import native_kernel

        if native_kernel() is None:
            raise pytest.UsageError("CI is set, and the native kernel was not built: install a C compiler")


def pytest_terminal_summary(terminalreporter):
    """Print why tests were skipped, a line a reason: a new one must not hide among those that every machine has."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4} skipped: {reason}")
