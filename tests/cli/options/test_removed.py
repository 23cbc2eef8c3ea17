"""Options, values and commands that are gone say what to use instead."""

import pytest

from offload.errors import UsageError
from triforce_cli.options import removed
from triforce_cli.options.removed import refuse_removed


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(removed, "REMOVED", {"old": "use new", "--gone": "use --here", "--kv q3": "use --kv q8"})


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["old"], "use new"),
        (["generate", "--gone"], "use --here"),
        (["generate", "--gone=1"], "use --here"),
        (["generate", "--kv", "q3"], "use --kv q8"),
        (["generate", "--kv=q3"], "use --kv q8"),
    ],
)
def test_what_is_gone_is_refused(args, hint):
    with pytest.raises(UsageError) as error:
        refuse_removed(args)
    assert error.value.hint == hint


@pytest.mark.parametrize("args", [[], ["generate", "old"], ["generate", "--kv", "q8"], ["generate", "-f", "q3"]])
def test_everything_else_passes(args):
    refuse_removed(args)
