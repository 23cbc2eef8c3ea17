#!/usr/bin/env python
"""Check the types with mypy: no file has more errors than scripts/type_errors.json says, and none has fewer.

scripts/check_types.py            # check; scripts/test.sh does
scripts/check_types.py --update   # write the numbers that were found, after errors have gone

A file that is not listed has none. The numbers may only fall: a change that raises one is to be corrected. mypy's
version is pinned, and its settings are in pyproject.toml.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "scripts" / "type_errors.json"
_ERROR = re.compile(r"(?P<file>[^:\n]+):\d+: error: ")


def run_mypy() -> list[str]:
    """Return mypy's errors, a line each. Exits if mypy itself fails."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or done.stderr:
        sys.exit(f"{done.stdout}{done.stderr}mypy failed, with exit code {done.returncode}")
    return [line for line in done.stdout.splitlines() if _ERROR.match(line)]


def count(errors: Sequence[str]) -> dict[str, int]:
    """Return the number of errors in each file that has some."""
    files = (_ERROR.match(line) for line in errors)
    return dict(sorted(Counter(Path(found["file"]).as_posix() for found in files if found).items()))


def problems(errors: Sequence[str], allowed: Mapping[str, int]) -> list[str]:
    """Return lines that say what differs from the allowed numbers; none if nothing does."""
    found, lines = count(errors), []
    for file in sorted({*found, *allowed}):
        now, before = found.get(file, 0), allowed.get(file, 0)
        if now > before:
            lines += [line for line in errors if line.startswith(f"{file}:")]
            lines.append(f"{file}: {now} errors of types, where {before} were allowed: correct the new ones")
        elif now < before:
            lines.append(f"{file}: {now} errors of types, where {before} were: run scripts/check_types.py --update")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Check or update; return the exit code."""
    allowed = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {}
    errors = run_mypy()
    lines = problems(errors, allowed)
    if list(arguments) == ["--update"]:
        STORED.write_text(json.dumps(count(errors), indent=1) + "\n", "utf-8")
    elif arguments:
        print(__doc__, file=sys.stderr)
        return 2
    elif lines:
        print("\n".join(lines), file=sys.stderr)
    print(f"types: {len(errors)} errors, {sum(allowed.values())} allowed", file=sys.stderr)
    return int(bool(lines) and not arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
