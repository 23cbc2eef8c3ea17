"""The user's config.yaml, `--show-config`, and variables of the environment that nothing reads."""

import json
import re

import pytest
import yaml

from tests.support.command import assert_error
from tests.support.paths import ROOT
from triforce_cli.options.config_file import NAMES, VARIABLES


@pytest.fixture
def config(tmp_path):
    """Return a function that writes config.yaml where `triforce` reads it."""

    def write(text):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / "config.yaml").write_text(text, "utf-8")

    return write


def shown(result):
    """Return the values and the origins that --show-config printed."""
    assert (result.returncode, result.stderr) == (0, "")
    origins = {line.partition(":")[0]: line.partition("  # ")[2] for line in result.stdout.splitlines()}
    return yaml.safe_load(result.stdout), origins


MINE = "name: mine\ndescription: x\ndevice: cpu\noptions: {top_p: 0.5, min_p: 0.1, top_k: 5, cache_limit: 1GiB}\n"


def test_flag_environment_config_profile_default(triforce, config, tmp_path, monkeypatch):
    monkeypatch.delenv("TRIFORCE_CACHE")
    config("profile: mine.yaml\ntemperature: 0.5\ntop_k: 7\nmin_p: 0.2\nmemory: 22GiB\nthink: off\ncache: false\n")
    (tmp_path / "config" / "mine.yaml").write_text(MINE)
    args = ("generate", "hi", "-n", "1", "--temperature", "0.1")
    values, origins = shown(triforce(*args, "--show-config", env={"TRIFORCE_TOP_K": "9"}))
    expected = {
        "temperature": (0.1, "flag"),
        "top_k": (9, "environment variable TRIFORCE_TOP_K"),
        "min_p": (0.2, "config.yaml"),
        "top_p": (0.5, "profile mine"),
        "cache_limit": ("1GiB", "profile mine"),
        "memory": ("22GiB", "config.yaml"),
        "cache": (False, "config.yaml"),
        "think": ("off", "config.yaml"),
        "chunk": (8, "default"),
    }
    assert {name: (values[name], origins[name]) for name in expected} == expected
    assert origins["profile"] == "config.yaml" and values["profile"].endswith("mine.yaml")
    lines = triforce(*args, "--json", "--think", "auto", env={"TRIFORCE_TOP_K": "9"}).stdout.splitlines()
    used = json.loads(lines[-1])["settings"]
    assert [used[name] for name in ("temperature", "top_k", "min_p", "top_p")] == [0.1, 9, 0.2, 0.5]
    assert (used["memory"], used["cache"]) == (22 * 2**30, False)


def test_what_is_shown_reads_back(triforce, config, monkeypatch):
    monkeypatch.delenv("TRIFORCE_CACHE")
    args = ("generate", "hi", "--show-config")
    given = ("--tree", "8", "--sampling", "coupled", "--seed", "3", "--link", "0.5", "--no-cache", "--disk", "/a: b")
    first = triforce(*args, *given)
    values, _ = shown(first)
    assert set(values) == set(NAMES)
    config(first.stdout)
    again, origins = shown(triforce(*args))
    assert again == values
    assert origins["tree"] == origins["sampling"] == origins["cache"] == "config.yaml"


@pytest.mark.parametrize("command", ["summarize", "chat", "serve", "bench"])
def test_the_shared_options_show_it_too(triforce, config, command, tmp_path):
    config("temperature: 0.25\n")
    (tmp_path / "a.txt").write_text("text")
    files = {"summarize": (tmp_path / "a.txt",), "bench": ("-f", tmp_path / "a.txt")}.get(command, ())
    values, origins = shown(triforce(command, *files, "--show-config"))
    assert (values["temperature"], origins["temperature"]) == (0.25, "config.yaml")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("\ntemprature: 0\n", "line 2: unknown key temprature", "did you mean temperature?"),
        ("stop: [a]\n", "line 1: unknown key stop", "--show-config"),
        ("temperature: hot\n", "line 1: temperature is 'hot', not a number", ""),
        ("top_k: 1\ntemperature: -1\n", "line 2: temperature: temperature is -1", "greedy"),
        ("memory: lots\n", "line 1: memory: 'lots' is not a size", "22GiB"),
        ("sampling: fast\n", "line 1: sampling is 'fast'", "coupled or fastest"),
        ("think: 3\n", "line 1: think is 3", "on, off, auto"),
        ("cache: 3\n", "line 1: cache is 3, not true or false", ""),
        ("profile: [a]\n", "line 1: profile is ['a'], not text", "name a profile"),
        ("budget: 64\nchunk: 32\n", "budget is 64, with chunks of 32", ""),
        ("- a\n", "not keys and values", "temperature: 0"),
        ("temperature: [\n", "not valid YAML", ""),
    ],
)
def test_a_mistake_in_it_names_the_line(triforce, config, text, message, hint):
    config(text)
    assert_error(triforce("generate", "hi"), 2, "config.yaml", message, hint)


def test_help_and_other_commands_do_not_read_it(triforce, config):
    config("temprature: 0\n")
    assert triforce("generate", "--help").returncode == 0
    assert triforce("cache", "list").returncode == 0


def test_an_unknown_variable_is_a_warning(triforce):
    env = {"TRIFORCE_TEMPRATURE": "0", "TRIFORCE_XYZZY": "1", "TRIFORCE_TEST_ANY": "1"}
    lines = triforce("cache", "list", env=env).stderr.splitlines()
    assert lines == [
        "warning: the environment variable TRIFORCE_TEMPRATURE is not known, and has no effect; did you mean "
        "TRIFORCE_TEMPERATURE?",
        "warning: the environment variable TRIFORCE_XYZZY is not known, and has no effect",
    ]


def test_all_variables_that_are_read_are_known_and_documented():
    sources = [path.read_text("utf-8") for name in ("offload", "triforce_cli") for path in (ROOT / name).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"(?<![_A-Z])TRIFORCE_[A-Z][A-Z_]*[A-Z]", text)}
    assert {name for name in read if not name.startswith("TRIFORCE_TEST_")} <= VARIABLES
    documented = (ROOT / "docs" / "options.md").read_text("utf-8")
    internal = {"TRIFORCE_EMULATE", "TRIFORCE_RANK_LAUNCHER", "TRIFORCE_RANK_FOLDER"}
    assert not [name for name in VARIABLES - internal if f"`{name}`" not in documented]
