"""Hints for mistyped commands, options and prompts."""

from pathlib import Path

import pytest

from tests.support.command import refused


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "hi", "--temprature", "0"), ("no option --temprature", "did you mean --temperature?")),
        (("generate", "hi", "--max-tokens", "5"), ("no option --max-tokens", "use --max-new-tokens N")),
        (("generate", "hi", "--color", "never"), ("put it before the command",)),
        (("generate", "-ngl", "9", "hi"), ("no option -ngl", "--memory 22GiB")),
        (("generate", "hi", "--chunk=9"), ("--chunk has no option", "--set chunk=VALUE")),
        (("generate", "hi", "--set", "chnk=9"), ("there is no setting 'chnk'", "did you mean chunk?")),
        (("generate", "hi", "--set", "chunk"), ("'chunk' gives no value", "NAME=VALUE")),
        (("generate", "hi", "--set", "chunk=0"), ("chunk is 0", "positive number")),
        (("generate", "hi", "--seed", "1", "--set", "seed=2"), ("--set seed=2 repeats the option",)),
        (("version",), ("use triforce --version",)),
        (("generate", "hello", "you"), ("quote the prompt: triforce generate 'hello you'", "-f FILE")),
        (("generate", "hi", "--zzz"), ("no option --zzz", "triforce generate --help")),
        (("genrate", "hi"), ("no command 'genrate'", "did you mean triforce generate?")),
        (("generate", "hi", "-n", "x"), ("max-new-tokens is 'x'", "a whole number")),
        (("generate", "hi", "-n"), ("error: -n takes a value", "see `triforce generate --help`")),
        (("generate", "hi", "--temperature", "hot"), ("temperature is 'hot'", "a number")),
        (("generate", "hi", "--memory", "much"), ("memory: 'much' is not a size",)),
        (("generate", "hi", "--regex", "a", "--json-schema", "{}"), ("contradict each other",)),
        (("serve", "--port", "99999"), ("--port is to be less than or equal to 65535",)),
        (("rm", "x"), ("no command 'rm'", "triforce models rm")),
        (("cache", "rm"), ("error: ID is missing", "triforce cache rm --help")),
        (("cache", "remove"), ("no command 'remove'", "triforce cache --help")),
    ],
)
def test_the_hint_names_what_was_meant(triforce_here, args, words):
    refused(triforce_here(*args), *words)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("TEMPERATURE", "hot", "temperature is 'hot'"),
        ("MEMORY", "abc", "memory: 'abc'"),
        ("CHUNK", "x", "chunk is 'x'"),
    ],
)
def test_a_variable_that_gave_a_wrong_value_is_named(triforce_here, name, value, word):
    result = triforce_here("generate", "hi", env={f"TRIFORCE_{name}": value})
    refused(result, word, f"hint: the value is that of the environment variable TRIFORCE_{name}; ")


def test_a_file_that_is_given_as_the_prompt(triforce_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my book.txt").write_text("The cat sat.")
    refused(triforce_here("generate", "my book.txt", "Who?"), "triforce generate -f 'my book.txt' 'Who?'")
    refused(triforce_here("my book.txt"), "did you mean triforce summarize 'my book.txt'?")
    refused(triforce_here("generate", "Who?", "my book.txt"), "triforce generate -f 'my book.txt' 'Who?'")
    code, out, err = triforce_here("generate", "my book.txt", "-n", "3")
    assert code == 0 and out
    assert err.startswith("warning: the prompt is the text 'my book.txt'; to read the file of that name: triforce gen")


def test_generate_has_at_most_55_options(triforce_here):
    code, out, _ = triforce_here("generate", "--help-all")
    assert code == 0
    assert sum(line.startswith("│ --") for line in out.splitlines()) - 1 <= 55  # but for --help
