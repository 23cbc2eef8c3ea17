"""Hints for mistyped commands and options."""

import json
from pathlib import Path

import pytest
import typer

from tests.support.command import refused
from tests.support.paths import ROOT
from triforce_cli.commands.bench import bench
from triforce_cli.commands.chat import chat
from triforce_cli.commands.generate import generate
from triforce_cli.commands.serve import serve
from triforce_cli.commands.summarize import summarize
from triforce_cli.options.other_names import FIELDS, OPTIONS, names_of


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "hi", "--temprature", "0"), ("no option --temprature", "did you mean --temperature?")),
        (("generate", "hi", "--no-stream"), ("no option --no-stream", "text is written as it comes")),
        (("generate", "hi", "--ctx-size", "9"), ("no option --ctx-size", "--extend-context")),
        (("summarize", "a", "--context", "9"), ("no option --context", "--truncate leaves out what does not fit")),
        (("generate", "-ngl", "9", "hi"), ("no option -ngl", "--memory 22GiB")),
        (("summarize", "a", "--repeat-penalty", "1.1"), ("use --repetition-penalty",)),
        (("generate", "-fa", "on", "hi"), ("no option -fa", "leave it out")),
        (("generate", "-md", "draft.gguf"), ("no option -md", "--draft MODEL")),
        (("version",), ("use triforce --version",)),
        (("help", "chat"), ("use triforce COMMAND --help",)),
        (("-V",), ("use triforce --version",)),
        (("serve", "--system-prompt", "a"), ("each request",)),
        (("generate", "hello", "you"), ('quote the prompt: triforce generate "hello you"', "-f FILE")),
        (("chat", "README.md"), ("triforce chat -f README.md",)),
        (("generate", "hi", "--promt-file", "a"), ("--promt-file", "did you mean --prompt-file?")),
        (("generate", "hi", "--zzz"), ("no option --zzz", "triforce generate --help")),
        (("genrate", "hi"), ("no command 'genrate'", "did you mean triforce generate?")),
        (("run", "hi"), ("no command 'run'", "use triforce generate")),
        (("complete",), ("use triforce generate",)),
        (("ask", "who?"), ("use triforce summarize", "--question")),
        (("list",), ("triforce cache list", "triforce doctor")),
        (("generate", "hi", "-n", "x"), ("--max-new-tokens takes a whole number", "--max-new-tokens 8")),
        (("generate", "hi", "-n"), ("error: -n takes a value", "see `triforce generate --help`")),
        (("generate", "hi", "--temperature", "hot"), ("--temperature takes a number", "--temperature 0.5")),
        (
            ("pull", "link", "levels"),
            ("levels is one argument too many", "see `triforce pull --help`"),
        ),
        (("summarize", "README.md", "Who tells it?"), ("no file Who tells it?", '--question "Who tells it?"')),
        (("generate", "a", "--probabilities"), ("--probabilities was removed", "logprobs")),
        (("generate", "hi", "--max-tokens", "-1"), ("error: --max-tokens is -1", "ask for at least 1")),
        (("generate", "hi", "--max-tokens", "x"), ("error: --max-tokens takes a whole number",)),
        (("profile", "--context", "999999999M"), ("--context: '999999999M' is more than 1,099,511,627,776 tokens",)),
        (("serve", "--max-body", "9000000T"), ("--max-body: '9000000T' is more than 1,152,921,504,606,846,976",)),
        (("cache", "prune", "--to", "x"), ("--to: 'x' is not a size",)),
        (("generate", "--hlep"), ("no option --hlep", "did you mean --help?")),
        (("generate", "hi", "--regex", "a", "--json-schema", "{}"), ("--json-schema and --regex contradict",)),
        (("bench", "hi", "--repeats", "0"), ("error: --repeats takes numbers from 1",)),
        (("serve", "--port", "99999"), ("error: --port takes numbers up to 65535",)),
        (("serve", "--max-body", "0"), ("error: --max-body is 0",)),
        (("cache", "rm"), ("error: ID is missing", "triforce cache rm --help")),
        (("pull", "smolm2"), ("did you mean smollm2-135m, SmolLM3-3B? a model is a name (",)),
        (("cache", "remove"), ("no command 'remove'", "triforce cache --help")),
    ],
)
def test_the_hint_names_what_was_meant(triforce_here, args, words):
    refused(triforce_here(*args), *words)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("TEMPERATURE", "hot", "--temperature takes a number"),
        ("TEMPERATURE", "-1", "temperature is -1.0"),
        ("MEMORY", "abc", "--memory: 'abc' is not a size"),
        ("CACHE", "maybe", "'--cache'"),
    ],
)
def test_a_variable_that_gave_a_wrong_value_is_named(triforce_here, name, value, word):
    result = triforce_here("generate", "hi", env={f"TRIFORCE_{name}": value})
    assert result.stderr.count("environment variable") == 1
    refused(result, word, f"hint: the value is that of the environment variable TRIFORCE_{name}; ")


def test_a_file_that_is_given_as_the_prompt(triforce_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my book.txt").write_text("The cat sat.")
    refused(triforce_here("generate", "my book.txt", "Who?"), "triforce generate -f 'my book.txt' \"Who?\"")
    refused(triforce_here("generate", "Who?", "my book.txt"), "triforce generate -f 'my book.txt' \"Who?\"")
    code, out, err = triforce_here("generate", "my book.txt", "-n", "3")
    assert code == 0 and out
    assert err.startswith("warning: the prompt is the text 'my book.txt'; to read the file of that name: triforce gen")
    assert "warning" not in triforce_here("generate", "-f", "my book.txt", "Who?", "-n", "1").stderr


def test_a_short_option_with_its_value_attached(triforce_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("The cat sat.")
    for args in (("-fa", "-n3"), ("--stop", "-fa", "-n", "3", "hi")):
        assert triforce_here("generate", *args).returncode == 0


def options_of(command):
    app = typer.Typer(add_completion=False)
    app.command()(command)
    params = typer.main.get_command(app).params
    return {name for param in params for name in (*param.opts, *param.secondary_opts)}


def test_other_names_are_accepted(triforce_here):
    names = (
        "--num_predict",
        "3",
        "--temp=0",
        "--model-draft",
        "none",
        "--stop-sequences",
        "x",
        "--torch_dtype",
        "float32",
    )
    code, out, err = triforce_here("generate", "hi", *names, "--json")
    settings = json.loads(out.splitlines()[-1])["settings"]
    assert code == 0, err
    assert settings["max_new_tokens"] == 3 and settings["temperature"] == 0 and settings["draft"] == "none"
    assert settings["stop"] == ["x"]


def test_the_table_of_other_names_is_whole():
    commands = {"generate": generate, "summarize": summarize, "chat": chat, "bench": bench, "serve": serve}
    options = {name: options_of(command) for name, command in commands.items()}
    everywhere = set.union(*options.values())
    names = names_of(OPTIONS).values()
    for row in names:
        assert row.hint or row.ours, row
        assert not row.ours or f"--{row.ours}" in everywhere, row
        typed = row.name if row.name.startswith("-") else f"--{row.name}"
        own = [name for name, found in options.items() if typed in found]
        assert own == (["summarize"] if row.name in ("prompt", "question") else []), f"{typed} is an option of {own}"
    text = (ROOT / "docs" / "names.md").read_text("utf-8")
    shown = [row.name if row.name.startswith("-") else f"--{row.name}" for row in names]
    missing = [name for name in [*shown, *names_of(FIELDS)] if f"`{name}`" not in text]
    assert missing == []
