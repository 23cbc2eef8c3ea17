"""`--quantize`: a smaller model that says so, and refusals where it cannot work."""

import pytest
from gguf import GGMLQuantizationType

from tests.support.command import STATISTICS, assert_error, done
from tests.support.gguf import write_gguf
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.offloading import native_kernel

PROMPT = ("generate", "Once upon a time " * 20, "-n", "8", "--temperature", "0", "--raw")
BF16 = ("--dtype", "bfloat16")

needs_kernel = pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")


@pytest.fixture(scope="module")
def narrow_model_dir(tmp_path_factory):
    """A model that the native kernel does not run."""
    folder = tmp_path_factory.mktemp("narrow")
    make_hf_model("llama", head_dim=8).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@needs_kernel
def test_the_statistics_name_it_and_a_warning_says_how_much_the_model_changed(triforce):
    found = {level: triforce(*PROMPT, *BF16, "--json", "--quantize", level) for level in ("q4", "q8")}
    agreements = {}
    for level, result in found.items():
        last = done(result.stdout)
        assert last["quantize"] == last["settings"]["quantize"] == level
        assert result.stderr.count("warning: ") == 1
        assert f"--quantize {level} changes the model" in result.stderr
        assert f"{100 * last['agreement']:.0f} % of the time" in result.stderr
        statistics = result.stderr.splitlines()[-1]
        assert STATISTICS.search(statistics) and f"weights rounded to {level}" in statistics
        agreements[level] = last["agreement"]
    assert 0 < agreements["q4"] <= agreements["q8"] <= 1
    plain = triforce(*PROMPT, *BF16, "--json")
    assert (done(plain.stdout)["quantize"], done(plain.stdout)["agreement"]) == (None, None)
    assert "quantize" not in plain.stderr and "rounded" not in plain.stderr


@needs_kernel
def test_refused_where_it_cannot_work(triforce, tmp_path, narrow_model_dir):
    quantize = (*PROMPT, "--quantize", "q4")
    assert_error(triforce(*quantize, "--dtype", "float32"), 2, "--quantize q4", "float32", "--dtype bfloat16")
    assert_error(triforce(*quantize, *BF16, "--kernel", "off"), 2, "the kernel is off", "--kernel auto")
    assert_error(triforce(*PROMPT, "--quantize", "q3"), 2, "quantize is 'q3'", "q4, q5, q6, q8")
    path = tmp_path / "model.gguf"
    write_gguf(path, make_hf_model("llama"), GGMLQuantizationType.Q4_0, tokenizer=make_tokenizer())
    assert_error(triforce(*quantize, *BF16, "--model", path), 2, "quantised already", "leave --quantize out")
    assert_error(triforce(*quantize, *BF16, "--model", narrow_model_dir), 2, "heads of 8")


def test_refused_without_a_kernel(triforce, monkeypatch):
    from offload.kernels.native import KernelUnavailable

    def none(level):
        raise KernelUnavailable("it was not built")

    monkeypatch.setattr("offload.loading.quantization_checks.find_kernel", none)
    assert_error(triforce(*PROMPT, *BF16, "--quantize", "q4"), 2, "it was not built", "triforce doctor")
