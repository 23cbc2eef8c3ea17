"""Very large numbers on the command line are refused, or treated as the largest possible, without a delay."""

import pytest

from offload.errors import SettingsError
from offload.short_repr import short_repr, short_text
from offload.units import parse_size, parse_tokens

HUGE = ["1" + "0" * 22, "9" * 400]
FLAGS = ("--max-new-tokens", "--budget", "sink", "--seed", "--tensor-parallel", "--memory", "cache_limit")


def given(name, value):
    return (name, value) if name.startswith("-") else ("--set", f"{name}={value}")


@pytest.mark.parametrize("value", HUGE, ids=len)
@pytest.mark.parametrize("flag", FLAGS)
def test_large_numbers_are_refused_at_once(triforce_here, flag, value):
    answer = triforce_here("generate", "hi", *given(flag, value))
    assert answer.returncode == 2 and "hint: " in answer.stderr and "bug" not in answer.stderr
    assert value[:10] in answer.stderr and len(answer.stderr) < 600


@pytest.mark.parametrize("value", HUGE, ids=len)
@pytest.mark.parametrize("flag", ["--temperature", "--link", "host_share"])
def test_large_rates_are_refused_or_used(triforce_here, flag, value):
    answer = triforce_here("generate", "hi", "-n", 2, *given(flag, value))
    assert answer.returncode in (0, 2) and "bug" not in answer.stderr


@pytest.mark.parametrize("value", [*HUGE, "9" * 400 + "K", "9" * 5000], ids=len)
def test_sizes_and_contexts(value):
    with pytest.raises(SettingsError):
        parse_size(value)
    with pytest.raises(SettingsError):
        parse_tokens(value)


def test_values_are_cut():
    assert short_repr("abc") == "'abc'" and short_repr(12) == "12" and short_repr([1, None]) == "[1, None]"
    bomb = ["x"]
    for _ in range(100):
        bomb = [bomb] * 9
    for value in (bomb, "x" * 10**6, 10**400, 2**100_000, dict.fromkeys(range(100), bomb), b"x" * 10**6):
        assert len(short_repr(value)) < 300
    assert short_text("two\n  lines") == "two lines" and len(short_text("x" * 10**6)) < 300
