"""A few of the random calls of the native kernel that scripts/fuzz_kernels.py makes by the hundred."""

import hashlib

import pytest

from offload.kernels.native import find_kernel
from tests.support.paths import SCRIPTS


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fuzz_kernels

    return fuzz_kernels


def test_random_calls_are_right_or_refused(fuzz, capsys):
    assert fuzz.fuzz(find_kernel(), range(40)) == 0, capsys.readouterr().err
    assert ", 0 wrong; digest " in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(1000, 1003))
def test_a_wrong_result_is_found(fuzz, seed, monkeypatch):
    """A planted fault: rows beside the output, or a result that is a little too large."""
    from fuzz_draws import guarded

    case = fuzz.norm_case(kernel := find_kernel(), fuzz.Draw(seed))
    found = case.run(case.tensors)
    case.judge(found)
    with pytest.raises(fuzz.Wrong, match="gate"):
        case.judge([found[0], found[1] * 1.01])
    with pytest.raises(fuzz.Wrong, match="beside"), guarded() as new:
        new(16).as_strided((17,), (1,))[16] = 0
    monkeypatch.setattr(fuzz, "CASES", (fuzz.norm_case,))
    monkeypatch.setattr(fuzz, "damaged", lambda x, draw: ("dtype", x))
    with pytest.raises(fuzz.Wrong, match="was not refused"):
        fuzz.try_case(kernel, seed, hashlib.sha256())
