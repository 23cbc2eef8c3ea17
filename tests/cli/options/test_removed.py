"""Options, values and commands that are gone say what to use instead."""

import re

import pytest

from offload.errors import UsageError
from tests.support.paths import ROOT
from triforce_cli.options import removed
from triforce_cli.options.removed import refuse_unknown_command, refuse_unknown_options

REMOVED = dict(removed.REMOVED)  # as it is, before a test replaces it
KEPT_ELSEWHERE = ("--batch", "--ray", "--nodes")  # by other commands, and by sbatch


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(removed, "REMOVED", {"old": "use new", "--gone": "use --here", "--kv q3": "use --kv q8"})


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["hi", "--gone"], "use --here"),
        (["--gone=1"], "use --here"),
        (["--kv", "q3"], "use --kv q8"),
        (["--kv=q3"], "use --kv q8"),
    ],
)
def test_what_is_gone_is_refused(args, hint):
    with pytest.raises(UsageError) as error:
        refuse_unknown_options(args, {"--kv"})
    assert error.value.hint == hint


def test_a_command_that_is_gone_is_refused():
    with pytest.raises(UsageError, match="the command old was removed"):
        refuse_unknown_command(["old", "-h"])


@pytest.mark.parametrize("args", [[], ["old"], ["--kv", "q8"], ["-f", "q3"]])
def test_everything_else_passes(args):
    refuse_unknown_options(args, {"--kv"})
    refuse_unknown_options(["--gone"], {"--gone"})
    refuse_unknown_command(["generate", *args])


@pytest.mark.parametrize("folder", ["offload", "triforce_cli", "docs", "examples"])
def test_nothing_names_an_option_that_is_gone(folder):
    """But the table itself; a value is gone with its option, as in `--kv q4`."""
    gone = {name for name in REMOVED if name.startswith("--") and name not in KEPT_ELSEWHERE}
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sbatch", ".html", ".js")]
    named = {}
    for path in files:
        words = re.findall(r"(?<![\w-])(--[\w-]+)(?:[ =]([\w-]+))?", path.read_text("utf-8"))
        if found := gone & {name for option, value in words for name in (option, f"{option} {value}")}:
            named[str(path.relative_to(ROOT))] = found
    named.pop("triforce_cli/options/removed.py", None)
    assert len(files) > 2 and named == {}
