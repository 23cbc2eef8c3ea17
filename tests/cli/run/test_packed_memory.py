"""`--kv auto` in a CPU's memory: packed where doctor has measured that it is faster, and nowhere else."""

import json
from dataclasses import replace

import pytest

from offload.hardware.calibration import Measured, PackedGain, save
from offload.hardware.schema import Host
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.offloading import native_kernel

RUN = ("generate", "Once upon a time", "-n", "40", "--raw", "--dtype", "bfloat16", "--temperature", "0")


@pytest.fixture
def model(tmp_path):
    """A model whose heads can be packed."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    make_hf_model("llama", head_dim=32).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def planned(triforce, model, tmp_path):
    """`planned(ratio, "--flag") -> the format that a run has`, with such a gain of this kernel and one thread."""

    def call(ratio, *more, **changes):
        gain = None if ratio is None else replace(PackedGain(ratio, 1, native_kernel().level), **changes)
        save(
            Measured("2026-01-31", "a CPU", "2.9.0", "cpu", host=Host(16, 23, 345, 4), packed=gain), tmp_path / "config"
        )
        found = triforce(*RUN, "--model", model, "--dry-run", "--json", *more)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)["plan"]["kv"]

    return call


def test_keys_and_values_are_packed_where_that_is_clearly_faster(planned):
    assert planned(1.2) == "packed"
    assert planned(1.05) == planned(None) == "exact"
    assert planned(1.2, threads=2) == planned(1.2, level="portable") == "exact"  # measured otherwise


@pytest.mark.parametrize("more", [("--kv", "bf16"), ("--dtype", "float32"), ("--kernel", "off")])
def test_what_was_asked_for_comes_first(planned, more):
    assert planned(1.2, *more) == "exact"


def test_the_text_is_the_same(triforce, model, tmp_path, planned):
    plain = triforce(*RUN, "--model", model).stdout
    assert planned(1.2) == "packed"
    assert triforce(*RUN, "--model", model).stdout == plain
