"""scripts/check_types.py: the number of errors of a file may neither rise nor fall unnoticed."""

import importlib.util
import json

import pytest

from tests.support.paths import ROOT

ERRORS = [
    'offload/a.py:3: error: Incompatible return value type (got "int", expected "str")  [return-value]',
    'offload/a.py:30: error: Item "None" of "Ring | None" has no attribute "size"  [union-attr]',
    'offload/b.py:1: error: Name "x" is not defined  [name-defined]',
]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("check_types", ROOT / "scripts" / "check_types.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_numbers_are_no_problem(script):
    assert script.count(ERRORS) == {"offload/a.py": 2, "offload/b.py": 1}
    assert script.problems(ERRORS, {"offload/a.py": 2, "offload/b.py": 1}) == []


def test_a_number_that_rises_shows_the_errors_of_the_file(script):
    *shown, last = script.problems(ERRORS, {"offload/a.py": 1, "offload/b.py": 1})
    assert shown == ERRORS[:2] and "2 errors of types, where 1 were allowed" in last
    assert len(script.problems(ERRORS, {})) == 5


def test_a_number_that_falls_is_to_be_updated(script):
    (line,) = script.problems(ERRORS[:1], {"offload/a.py": 2})
    assert line.startswith("offload/a.py: 1 errors") and "--update" in line
    (line,) = script.problems([], {"offload/a.py": 2})
    assert "0 errors" in line


def test_the_check_fails_in_both_cases_and_updates(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(script, "run_mypy", lambda: ERRORS)
    assert script.main([]) == 1 and "b.py: 1 errors of types, where 0 were allowed" in capsys.readouterr().err
    assert script.main(["--update"]) == 0 and script.main([]) == 0
    monkeypatch.setattr(script, "run_mypy", lambda: ERRORS[:2])
    assert script.main([]) == 1 and "--update" in capsys.readouterr().err


def test_files_with_errors_exist():
    stored = json.loads((ROOT / "scripts" / "type_errors.json").read_text("utf-8"))
    assert all((ROOT / file).is_file() and number > 0 for file, number in stored.items())
