"""Hints for mistyped commands and options."""

import pytest

from tests.support.command import refused


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "hi", "--temp", "0"), ("no option --temp", "did you mean --temperature?")),
        (("generate", "hi", "--promt-file", "a"), ("--promt-file", "did you mean --prompt-file?")),
        (("generate", "hi", "--zzz"), ("no option --zzz", "triforce generate --help")),
        (("genrate", "hi"), ("no command 'genrate'", "did you mean triforce generate?")),
        (("run", "hi"), ("no command 'run'", "use triforce generate")),
        (("complete",), ("use triforce generate",)),
        (("ask", "who?"), ("use triforce summarize", "--question")),
        (("list",), ("triforce cache list", "triforce doctor")),
        (("cache", "remove"), ("no command 'remove'", "triforce cache --help")),
    ],
)
def test_the_hint_names_what_was_meant(triforce_here, args, words):
    refused(triforce_here(*args), *words)
