"""Twelve random combinations of options, as scripts/fuzz_options.py draws them by the hundred."""

import importlib.util
import re
import sys
from collections import Counter

import pytest

from tests.support.models import make_hf_model, make_tokenizer
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "fuzz_options.py"
LENGTHS = (40, 700, 1700)  # bytes are tokens here, and the context has 2,048


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_options", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def fuzzer(fuzz, tiny_model_dir, tmp_path_factory):
    draft = tmp_path_factory.mktemp("draft")
    make_hf_model("llama", seed=1, num_hidden_layers=1).save_pretrained(draft)
    make_tokenizer().save_pretrained(draft)
    text = re.sub(r"[^ -~\n]", "", fuzz.BOOK.read_text("utf-8"))  # one byte per character
    return fuzz.Fuzzer(str(tiny_model_dir), str(draft), 0, text, LENGTHS)


@pytest.mark.daily("0", "1")
@pytest.mark.parametrize("number", range(12))
def test_no_combination_changes_the_text(fuzz, fuzzer, number, triforce_here):
    with fuzz.isolated_home():
        outcome, remark = fuzzer.check(number)
    assert outcome == "equal", remark


def test_different_text_and_failures_are_found(fuzz, fuzzer, monkeypatch):
    plain = ("--method", "ar", "--no-cache")
    outcomes = iter([fuzz.Outcome(0, "one", "", 0.1), fuzz.Outcome(0, "other", "", 0.1)])
    monkeypatch.setattr(fuzz, "execute", lambda arguments, prompt: next(outcomes))
    assert fuzzer.check(3)[0] == "differs"
    monkeypatch.setattr(fuzz, "execute", lambda arguments, prompt: fuzz.Outcome(1, "", "error: x", 0.1))
    assert fuzzer.check(3)[0] == "failed"
    monkeypatch.setattr(fuzz, "execute", lambda arguments, prompt: fuzz.Outcome(2, "", "error: x\nhint: y", 0.1))
    assert fuzzer.check(3) == ("refused", "error: x")
    assert fuzz.passed(Counter(equal=7, refused=3))
    for bad in (Counter(equal=7, differs=1), Counter(equal=7, failed=1), Counter(equal=1, refused=2), Counter()):
        assert not fuzz.passed(bad)
    assert fuzzer.combination(3).reference("m")[-3:] == list(plain)


def test_number_and_seed_determine_the_combination(fuzz, fuzzer):
    assert fuzzer.combination(5) == fuzzer.combination(5)
    assert len({fuzzer.combination(number) for number in range(50)}) == 50
