"""The user's config.yaml, and variables of the environment that nothing reads."""

import json
import re

import pytest

from tests.support.command import assert_error
from tests.support.paths import ROOT
from triforce_cli.options.config_file import VARIABLES


@pytest.fixture
def config(tmp_path):
    """Return a function that writes config.yaml where `triforce` reads it."""

    def write(text):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / "config.yaml").write_text(text, "utf-8")

    return write


MINE = "name: mine\ndescription: x\ndevice: cpu\noptions: {top_p: 0.5, min_p: 0.1, top_k: 5, cache_limit: 1GiB}\n"


def test_flag_environment_config_profile_default(triforce, config, tmp_path, monkeypatch):
    monkeypatch.delenv("TRIFORCE_CACHE")
    config(
        "profile: mine.yaml\ntemperature: 0.5\ntop_k: 7\nmin_p: 0.2\nsink: 4\nmemory: 22GiB\nthink: off\ncache: false\n"
    )
    (tmp_path / "config" / "mine.yaml").write_text(MINE)
    args = ("generate", "hi", "-n", "1", "--temperature", "0.1", "--json", "--think", "auto", "--set", "window=64")
    lines = triforce(
        *args, env={"TRIFORCE_TOP_K": "9", "TRIFORCE_CHUNK": "32", "TRIFORCE_WINDOW": "9"}
    ).stdout.splitlines()
    used = json.loads(lines[-1])["settings"]
    expected = {
        "temperature": 0.1,  # an option
        "window": 64,  # --set, above the environment
        "top_k": 9,  # the environment, with an option of that name
        "chunk": 32,  # and without
        "min_p": 0.2,  # config.yaml
        "sink": 4,
        "memory": 22 * 2**30,
        "cache": False,
        "top_p": 0.5,  # the profile
        "cache_limit": 2**30,
    }
    assert {name: used[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("\ntemprature: 0\n", ": unknown key temprature", "did you mean temperature?"),
        ("stop: [a]\n", ": unknown key stop", "docs/options.md"),
        ("temperature: hot\n", ": temperature is 'hot'", "a number"),
        ("top_k: 1\ntemperature: -1\n", ": temperature is -1", "greedy"),
        ("budget: 64\nchunk: 32\n", "budget is 64, with chunks of 32", ""),
        ("temperature: [\n", "not valid YAML", ""),
    ],
)
def test_a_mistake_in_it_names_the_file(triforce, config, text, message, hint):
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
