"""Options, values and commands that are gone say what to use instead."""

import pytest

from offload.errors import UsageError
from triforce_cli.options import removed
from triforce_cli.options.removed import refuse_removed_command, refuse_removed_options


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
        refuse_removed_options(args, {"--kv"})
    assert error.value.hint == hint


def test_a_command_that_is_gone_is_refused():
    with pytest.raises(UsageError, match="the command old was removed"):
        refuse_removed_command(["old", "-h"])


@pytest.mark.parametrize("args", [[], ["old"], ["--kv", "q8"], ["-f", "q3"]])
def test_everything_else_passes(args):
    refuse_removed_options(args, {"--kv"})
    refuse_removed_options(["--gone"], {"--gone"})
    refuse_removed_command(["generate", *args])
