"""Options that a run cannot follow, by themselves, together, or with this model and machine: refused with a hint."""

import shutil

import pytest
from gguf import GGMLQuantizationType

from tests.support.command import assert_error
from tests.support.gguf import write_gguf
from tests.support.models import FAMILY_CASES, make_hf_model, make_tokenizer

LINK, BF16 = ("--link", "5"), ("--dtype", "bfloat16")
H2O = ("--approximate", "h2o", "--budget", "64", "--set", "window=16")
PACKED, Q4 = ("--kv", "packed"), ("--quantize", "q4", *BF16)
REFUSED = [  # options, and words of the error or its hint
    (("--method", "naive"), ("naive needs a draft model", "--draft")),
    (("--method", "naive", "--draft", "lookup"), ("draft model",)),
    (("--method", "speculative"), ("'speculative'", "lookup")),
    (("--set", "chunk=512", "--budget", "1024"), ("1024", "512")),
    (("--gamma2", "0"), ("gamma2",)),
    (("--middle", "h20"), ("middle is 'h20'",)),
    (("--tree", "bush"), ("'bush'", "auto; chain", "k-ary:2x3x1")),
    (("--tree", "k-ary:2x"), ("'k-ary:2x'",)),
    (("--tree", "0"), ("1 to 1,024",)),
    (("--tree", "k-ary:9x9x9x9"), ("7,380 nodes", "smaller")),
    (("--set", "tree_sampling=top_k"), ("'top_k'", "top-k")),
    ((*H2O, "--verify"), ("--verify compares with exact decoding", "leave one of the two out")),
    ((*H2O, "--dry-run"), ("--dry-run plans exact decoding",)),
    ((*H2O, "--method", "triforce"), ("h2o decodes plainly, and the method is triforce", "leave --method out")),
    ((*H2O, "--offload", "stream"), ("--offload stream offloads keys and values",)),
    ((*H2O, "--link", "1"), ("--link 1.0 offloads keys and values",)),
    ((*H2O, "--disk", "."), ("--disk . offloads keys and values",)),
    (("--approximate", "h20"), ("approximate is 'h20'", "streaming-llm, h2o")),
    (("--kv", "q8", "--verify"), ("--verify compares with exact decoding, and --kv q8 changes the answer",)),
    (("--kv", "q8", "--approximate", "h2o"), ("--approximate h2o and --kv q8 cannot be used together",)),
    (("--kv", "q8", "--kernel", "off"), ("--kv q8 needs the native kernel",)),
    (("--kv", "q5"), ("kv is 'q5'", "auto, bf16, packed, q8")),
    ((*PACKED, "--dtype", "float32"), ("--kv packed packs keys and values in bfloat16, and the dtype is float32",)),
    ((*PACKED, *BF16, "--kernel", "off"), ("--kv packed needs the native kernel",)),
    ((*PACKED, *BF16), ("--kv packed packs keys and values of heads of a multiple of 32", "heads of 16")),
    (("--quantize", "q4", "--dtype", "float32"), ("--quantize q4", "float32", "--dtype bfloat16")),
    ((*Q4, "--kernel", "off"), ("the kernel is off", "--kernel auto")),
    (("--quantize", "q3"), ("quantize is 'q3'", "q4, q5, q6, q8")),
    (("--experts", "host"), ("for a mixture of experts", "leave it out")),
    ((*LINK, "--experts", "all"), ("experts is 'all'",)),
    ((*LINK, "--experts", "hybrid"), ("--experts hybrid was removed",)),
    ((*LINK, "--offload", "host", "--set", "host_share=0"), ("host-share goes with hybrid",)),
    (("--link", "0"), ("link is 0",)),
    (("--offload", "stream"), ("this device is the CPU",)),
    (("--set", "host_share=0.5"), ("this device is the CPU",)),
    ((*LINK, "--resident-layers", "3"), ("--resident-layers is 3, and 2 layers of this model have",)),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda each: " ".join(each)[:60])
def test_options_that_cannot_be_followed(triforce, options, words):
    assert_error(triforce("generate", "hi", "--raw", "-n", "1", *options), 2, *words)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*LINK, "--memory", "1KiB"), "do not fit"),
        ((*LINK, "--offload", "stream", "--host-memory", "1KiB"), "host memory"),
        (("--resident-layers", "1"), "this device is the CPU"),
    ],
)
def test_placements_that_do_not_fit(triforce, options, message, more):
    result = triforce("generate", "the cat " * 400, "--raw", "-n", "4", *options, *more)
    assert result.returncode in (1, 2) and (more or result.stdout == "")
    assert message in result.stderr and "hint: " in result.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Quantised weights, a model that the native kernel does not run, and a mixture of experts."""
    folder = tmp_path_factory.mktemp("models")
    path, narrow, mixture = folder / "model.gguf", folder / "narrow", folder / "mixture"
    write_gguf(path, make_hf_model("llama"), GGMLQuantizationType.Q4_0, tokenizer=make_tokenizer())
    make_hf_model("llama", head_dim=8).save_pretrained(narrow)
    family, changes = FAMILY_CASES["qwen3-moe"]
    make_hf_model(family, **changes).save_pretrained(mixture)
    for folder in (narrow, mixture):
        make_tokenizer().save_pretrained(folder)
    return path, narrow, mixture


def test_models_that_an_option_does_not_go_with(triforce, models):
    path, narrow, mixture = models
    run = ("generate", "hi", "--raw", "-n", "1", "--model")
    assert_error(triforce(*run, path, *Q4), 2, "quantised already", "leave --quantize out")
    assert_error(triforce(*run, narrow, *Q4), 2, "heads of 8")
    assert_error(triforce(*run, mixture, "--experts", "host"), 2, "this device is the CPU")
    assert_error(triforce(*run, mixture, *LINK, "--experts", "host", *H2O), 2, "--approximate h2o")


def test_rounded_weights_without_a_kernel(triforce, monkeypatch):
    from offload.kernels.native import KernelUnavailable

    def none(level):
        raise KernelUnavailable("it was not built")

    monkeypatch.setattr("offload.loading.quantization_checks.find_kernel", none)
    assert_error(triforce("generate", "hi", *Q4), 2, "it was not built", "triforce doctor")


def test_a_system_message_and_a_switch_of_thinking_need_a_chat_template(triforce, tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template.jinja"))
    for more in (("--system", "Be brief."), ("--think", "on")):
        result = triforce("generate", "hi", *more, "--model", tmp_path / "model")
        assert_error(result, 2, f"no chat template, which {more[0]} needs")
