"""A whole decoder on the native kernel: torch's logits, and the same bits however tokens are grouped."""

import shutil
import subprocess
from functools import cache

import pytest
import torch

from offload import GenerationConfig, Sampling
from offload.engine import Engine
from offload.errors import TriforceError
from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kernels.native.library import open_library
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.models import make_hf_model

CPU = torch.device("cpu")
LENGTH = 700  # more than a piece of the kernel's
WIDE = {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def native():
    try:
        return NativeOperations(find_kernel())
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def loaded(family, dtype, operations, **changes):
        folder = tmp_path_factory.mktemp(family)
        make_hf_model(family, **changes).save_pretrained(folder)
        return load_model(FolderCheckpoint(folder), dtype, CPU, lambda done, total: None, operations)

    return loaded


def ids(count, vocab=267):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(0))


def logits(model, chunk):
    cache = model.new_cache(LENGTH)
    return torch.cat([model.logits(model.forward(part, cache)) for part in ids(LENGTH).split(chunk)])


@pytest.mark.parametrize(("family", "dtype"), [("mistral", torch.float32), ("qwen2", torch.bfloat16)])
def test_logits_are_torch_s(family, dtype, load, native):
    found, expected = (logits(load(family, dtype, do), 512) for do in (native, TorchOperations()))
    tolerance = 2e-4 if dtype == torch.float32 else 0.02 * expected.abs().max()
    assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_the_same_bits_in_whatever_chunks_by_any_number_of_threads(family, dtype, load, native, set_threads):
    model = load(family, dtype, native)
    whole = logits(model, LENGTH)
    for threads, chunk in ((2, 1), (3, 7), (16, 64), (64, 512)):
        set_threads(threads)
        assert torch.equal(logits(model, chunk), whole), chunk


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_verified_row_is_the_decoded_row_to_the_bit(dtype, load, native):
    model, sequence = load("llama", dtype, native, **WIDE), TokenSequence(ids(600).tolist())
    verified, plain = (Runner(model, model.new_cache(LENGTH)) for _ in range(2))
    draft = ids(20).tolist()
    rows = verified.rows(sequence, draft)
    for row, token in zip(rows, [*draft, 0], strict=True):
        assert torch.equal(plain.rows(sequence)[0], row)
        sequence.extend([token])


def test_a_library_of_other_sources_is_not_called(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    for name, source in (("old", "int other;"), ("new", "long long triforce_layout(void) { return 7; }")):
        (tmp_path / f"{name}.c").write_text(source)
        library = tmp_path / f"{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", tmp_path / f"{name}.c", "-o", library], check=True, timeout=60)
        with pytest.raises(KernelUnavailable, match="other sources"):
            open_library(library)


@pytest.fixture(scope="module")
def without_numbers(tmp_path_factory):
    """Return a function that returns the folder of a model one of whose weights is NaN."""

    @cache
    def saved(weight):
        source, folder = make_hf_model("llama", **WIDE), tmp_path_factory.mktemp(weight)
        with torch.no_grad():
            next(w for name, w in source.named_parameters() if weight in name).fill_(float("nan"))
        source.save_pretrained(folder)
        return folder

    return saved


@pytest.mark.daily("*-torch.bfloat16", "*-q_proj-*")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
def test_weights_that_are_no_numbers_are_an_error(weight, dtype, kernel, without_numbers):
    """At every level, whatever hides NaN on its way: a maximum, a fold, a rounding."""
    checkpoint = FolderCheckpoint(without_numbers(weight))
    model = load_model(checkpoint, dtype, CPU, lambda done, total: None, NativeOperations(kernel))
    for count in (3, 520):  # more than a piece
        with pytest.raises(TriforceError, match="no numbers"):
            list(Engine(model, (), 512).generate(ids(count).tolist(), Sampling(temperature=0), GenerationConfig(4)))
