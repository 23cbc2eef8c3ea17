"""scripts/mutate.py: every planted defect is caught by its test, and the table keeps up with the sources."""

import importlib.util
import sys

import pytest

from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
mutate = importlib.util.module_from_spec(SPEC)
sys.modules["mutate"] = mutate  # where dataclasses look for it
SPEC.loader.exec_module(mutate)
MUTATIONS = mutate.read_mutations()


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    return mutate.Copy(tmp_path_factory.mktemp("copy"))


def test_no_mutation_is_stale():
    assert mutate.stale(MUTATIONS) == []
    assert len({(each.file, each.old, each.new) for each in MUTATIONS}) == len(MUTATIONS)


def test_what_no_longer_applies_is_stale(tmp_path):
    (tmp_path / "a.py").write_text("one = 1\ntwo = 2\ntwo = 2\n")
    (tmp_path / "test_a.py").write_text("def test_a():\n    pass\n")
    rows = [("one = 1", "test_a[x]"), ("two = 2", "test_a"), ("three", "test_a"), ("one = 1", "test_b")]
    found = [mutate.Mutation("a.py", old, "", "", f"test_a.py::{test}") for old, test in rows]
    assert [bool(mutate.stale([each], tmp_path)) for each in found] == [False, True, True, True]
    assert found[0].apply(tmp_path) == "\ntwo = 2\ntwo = 2\n"


@pytest.mark.long
def test_a_mutation_that_no_test_notices_has_escaped_and_leaves_no_trace(copied):
    file, test = "offload/units.py", "tests/test_units.py"
    before = (ROOT / file).read_bytes()
    name = next(each.test for each in MUTATIONS if each.file.endswith("text_stream.py"))
    for new, where, verdict in (
        ("", name, "escaped"),
        ("raise OSError\n", name, "stale"),
        ("", f"{test}::no", "stale"),
    ):
        planted = mutate.Mutation(file, before.decode(), before.decode() + "\n" + new, "", where)
        assert copied.judge(planted).startswith(verdict)
    assert (ROOT / file).read_bytes() == before == (copied.root / file).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.reason)
def test_each_mutation_is_caught(copied, mutation):
    assert copied.judge(mutation).startswith("caught")


def test_the_tests_of_all_mutations_together_have_more_time_than_one(monkeypatch, capsys):
    limits = []

    def run(command, timeout, **rest):
        limits.append(timeout)
        return mutate.subprocess.CompletedProcess(command, mutate._FAILED if len(limits) > 1 else 0)

    monkeypatch.setattr(mutate.subprocess, "run", run)
    monkeypatch.setattr(mutate.shutil, "copytree", lambda *args, **kwargs: None)
    monkeypatch.setattr(mutate.Mutation, "apply", lambda *args: "")
    monkeypatch.setattr(mutate.Copy, "judge", lambda copy, mutation: copy._verdict(mutation.test))
    assert mutate.main(["a pass runs chunks"]) == 0
    assert limits == [None, mutate.TIMEOUT]
    assert capsys.readouterr().out.endswith("1 mutations, 1 caught\n")
