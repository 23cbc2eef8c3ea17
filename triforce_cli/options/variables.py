"""The environment variables that the program reads, and warnings about others with its prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from offload.hardware.schema import OPTION_NAMES

PREFIX = "TRIFORCE_"
_WITHOUT = ("stop", "coupled")  # settings without a variable of their name
_OTHERS = ("SAMPLING", "THINK", "PROFILE", "COLOR", "HOME", "CONFIG", "DEBUG", "API_KEY")
_INTERNAL = ("EMULATE", "RANK_LAUNCHER", "RANK_FOLDER")  # of tests, and between the ranks of one run
VARIABLES = {f"{PREFIX}{name.upper()}" for name in OPTION_NAMES if name not in _WITHOUT}
VARIABLES |= {PREFIX + name for name in (*_OTHERS, *_INTERNAL)}


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable with the program's prefix that nothing reads, with the closest one."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(f"{PREFIX}TEST_"):
            meant = "".join(f"; did you mean {each}?" for each in get_close_matches(name, VARIABLES, 1, 0.8))
            yield f"the environment variable {name} is not known, and has no effect{meant}"
